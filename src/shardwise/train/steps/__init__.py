"""The results, data and problems of steps: values, times, updates, odd losses."""
