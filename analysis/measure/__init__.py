"""What is in these gradients?"""
