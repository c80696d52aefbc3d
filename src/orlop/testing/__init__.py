"""What tests of Orlop, and of what is written for it, stand on: doubles cranked by hand and a request runner.

In: a scheduler half, a manager, a tier. Out: assertions. Never: imported by the library itself.
"""
