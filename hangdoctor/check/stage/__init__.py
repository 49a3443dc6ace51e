"""What a server on the CPU needs: a tiny model's maker, and stand-ins for what only GPUs have."""
