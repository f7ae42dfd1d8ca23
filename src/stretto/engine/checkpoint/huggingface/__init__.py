"""Import and export models as Hugging Face folders (config.json, safetensors), tensor by tensor."""
