"""Tables, pictures, progress and files."""
