"""The libraries that train. Nobody else knows them."""
