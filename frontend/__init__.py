"""From the Python source of a kernel to tile IR: `build.build_module` is the way in."""
