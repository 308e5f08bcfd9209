"""Results, data and problems of steps: values, times, updates, abnormal losses."""
