"""One window against its number formats and against float32."""
