"""Models in Hugging Face's folders of config.json and safetensors files, in and out tensor by tensor."""
