"""Device code that ladders share."""
