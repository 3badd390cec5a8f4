"""Do gradients have the slice structure that GradiVeQ builds on?"""
