"""Process sound: log-mel spectra, and the convolutions of codecs and vocoders."""
