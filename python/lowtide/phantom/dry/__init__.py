"""Programs on torch's own CUDA build, dry: over a driver that computes nothing
(csrc/phantom/driver; docs/design/phantom.md).

``launch`` starts them; everything else here runs inside their process, without the rest
of lowtide.
"""
