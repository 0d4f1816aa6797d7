"""The store of trials: records, the database, tables that travel between machines."""
