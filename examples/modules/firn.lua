-- Module file for Lmod: copy it to MODULEPATH/firn/VERSION.lua and set where the tarball was unpacked.
local prefix = "/opt/firn"

help([[Firn, a file system for checkpoints: `firn mount BACKING MOUNT_POINT`, `man firn`.]])
whatis("Name: firn")
whatis("Description: file system for checkpoints")
conflict("firn")

prepend_path("PATH", pathJoin(prefix, "bin"))
prepend_path("MANPATH", pathJoin(prefix, "share/man"))
-- For programs that look for libfirn at run time, such as Python's ctypes, and for LD_PRELOAD without a directory.
prepend_path("LD_LIBRARY_PATH", pathJoin(prefix, "lib"))
prepend_path("LIBRARY_PATH", pathJoin(prefix, "lib"))
prepend_path("CPATH", pathJoin(prefix, "include"))
prepend_path("PKG_CONFIG_PATH", pathJoin(prefix, "lib/pkgconfig"))
