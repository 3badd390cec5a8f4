"""Which setting for each layer?"""
