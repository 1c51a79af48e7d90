"""Names of other systems on the lazy device, for scripts that are written for them.

    import lazystep.compat.torch_lazy as torch_lazy             # instead of torch._lazy
    import lazystep.compat.torch_xla as torch_xla               # instead of torch_xla
    import lazystep.compat.torch_xla.core.xla_model as xm

Each package has the modules of the system that it stands for, with the same names and parameters. A name does
here what it does there, as far as that means something on the lazy device. Otherwise it raises
`UnsupportedError` when it is called, and the message says what to use.

`names` knows every name and what it does here; the tables in docs/coming-from.md are made from it. Importing
these packages imports lazystep, with all that `import lazystep` does.

Reading order: names, then the packages torch_lazy and torch_xla.
"""
