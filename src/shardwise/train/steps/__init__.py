"""What steps leave, find and take: values, times, updates, odd losses."""
