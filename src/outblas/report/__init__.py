"""What was measured beside what the seed documents claim: ladder, roofline, claims, HTML pages,
README.
"""
