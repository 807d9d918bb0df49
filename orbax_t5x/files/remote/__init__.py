"""Files of remote stores, whatever their scheme."""
