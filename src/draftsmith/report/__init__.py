"""One HTML page and its pictures about runs that are over, or still going."""
