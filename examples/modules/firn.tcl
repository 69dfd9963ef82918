#%Module1.0
# Module file for Environment Modules, and for Lmod: copy it to MODULEPATH/firn/VERSION and set where the tarball was
# unpacked.
set prefix /opt/firn

proc ModulesHelp { } {
    puts stderr {Firn, a file system for checkpoints: `firn mount BACKING MOUNT_POINT`, `man firn`.}
}
module-whatis {file system for checkpoints}
conflict firn

prepend-path PATH $prefix/bin
prepend-path MANPATH $prefix/share/man
# For programs that look for libfirn at run time, such as Python's ctypes, and for LD_PRELOAD without a directory.
prepend-path LD_LIBRARY_PATH $prefix/lib
prepend-path LIBRARY_PATH $prefix/lib
prepend-path CPATH $prefix/include
prepend-path PKG_CONFIG_PATH $prefix/lib/pkgconfig
