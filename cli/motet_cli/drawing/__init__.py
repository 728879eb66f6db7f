"""Have images and videos made by a running server: `motet draw`, `motet film`."""
