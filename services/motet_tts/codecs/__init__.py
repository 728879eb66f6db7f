"""Turn codes, latents and spectra into samples as a stream: Mimi, DAC, HiFi-GAN."""
