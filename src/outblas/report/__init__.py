"""The report of a sweep: what was found, as tables, a chart and an HTML page."""
