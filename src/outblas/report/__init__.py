"""The report of a sweep, and the HTML pages it is shown on."""
