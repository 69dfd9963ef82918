//! Forwarding of calls from a layer (a backing that wraps another one) to the backing below it.

/// Implements calls that a layer passes to the backing below unchanged: `forward!(via: sync lock descriptor);` in an
/// `impl` block of one of the traits. A call that the layer neither lists here nor implements does not compile.
///
/// `via` is a macro of the layer. It translates the arguments of a call into those for the backing below, and makes the
/// call there:
///
/// ```
/// macro_rules! via {
///     ($layer:ident, |$below:ident| $call:expr) => {{
///         let $below = &$layer.below;
///         $call
///     }};
///     ($layer:ident, inode $inode:ident, |$below:ident| $call:expr) => {{
///         let ($below, $inode) = (&$layer.below, &$inode.below);
///         $call
///     }};
/// }
/// ```
///
/// `via` needs a rule for each form that the listed calls use:
///
/// | form | arguments that belong to the layer |
/// |---|---|
/// | <code>via!(self, \|below\| ..)</code> | none |
/// | <code>via!(self, inode a, \|below\| ..)</code> | the inode `a`; the same for `file` and `dir` |
/// | <code>via!(self, inodes a b, \|below\| ..)</code> | the inodes `a` and `b`; the same for `files` |
#[macro_export]
macro_rules! forward {
    ($via:ident: $($call:ident)+) => { $( $crate::forward!(@$call $via); )+ };

    // Volume.
    (@features $via:ident) => {
        fn features(&self) -> $crate::Features {
            $via!(self, |below| below.features())
        }
    };
    (@statfs $via:ident) => {
        fn statfs(&self) -> $crate::Result<$crate::StatFs> {
            $via!(self, |below| below.statfs())
        }
    };
    (@sync_scope $via:ident) => {
        fn sync_scope(&self, scope: $crate::SyncScope<'_, Self::Inode>) -> $crate::Result<()> {
            use $crate::SyncScope::{All, Changes, Dir, Tree};
            match scope {
                All => $via!(self, |below| below.sync_scope(All)),
                Changes => $via!(self, |below| below.sync_scope(Changes)),
                Tree(inode) => $via!(self, inode inode, |below| below.sync_scope(Tree(inode))),
                Dir(inode) => $via!(self, inode inode, |below| below.sync_scope(Dir(inode))),
            }
        }
    };

    // Names.
    (@link $via:ident) => {
        fn link(
            &self,
            inode: &Self::Inode,
            parent: &Self::Inode,
            name: &::std::ffi::OsStr,
        ) -> $crate::Result<$crate::Attr> {
            $via!(self, inodes inode parent, |below| below.link(inode, parent, name))
        }
    };
    (@remove $via:ident) => {
        fn remove(
            &self,
            parent: &Self::Inode,
            name: &::std::ffi::OsStr,
            what: $crate::Remove,
        ) -> $crate::Result<()> {
            $via!(self, inode parent, |below| below.remove(parent, name, what))
        }
    };
    (@rename $via:ident) => {
        fn rename(
            &self,
            parent: &Self::Inode,
            name: &::std::ffi::OsStr,
            new_parent: &Self::Inode,
            new_name: &::std::ffi::OsStr,
            flags: $crate::RenameFlags,
        ) -> $crate::Result<()> {
            $via!(self, inodes parent new_parent, |below| {
                below.rename(parent, name, new_parent, new_name, flags)
            })
        }
    };
    (@readlink $via:ident) => {
        fn readlink(&self, inode: &Self::Inode) -> $crate::Result<Vec<u8>> {
            $via!(self, inode inode, |below| below.readlink(inode))
        }
    };
    (@open_dir $via:ident) => {
        fn open_dir(&self, inode: &Self::Inode) -> $crate::Result<Self::Dir> {
            $via!(self, inode inode, |below| below.open_dir(inode))
        }
    };
    (@read_dir $via:ident) => {
        fn read_dir(
            &self,
            dir: &Self::Dir,
            cookie: i64,
            sink: &mut dyn FnMut($crate::DirEntry<'_>) -> bool,
        ) -> $crate::Result<()> {
            $via!(self, dir dir, |below| below.read_dir(dir, cookie, sink))
        }
    };

    // Attributes.
    (@stat $via:ident) => {
        fn stat(
            &self,
            target: $crate::TargetOf<'_, Self>,
            freshness: $crate::Freshness,
        ) -> $crate::Result<$crate::Attr> {
            use $crate::Target::{File, Inode};
            match target {
                Inode(inode) => $via!(self, inode inode, |below| below.stat(Inode(inode), freshness)),
                File(file) => $via!(self, file file, |below| below.stat(File(file), freshness)),
            }
        }
    };
    (@set_attr $via:ident) => {
        fn set_attr(
            &self,
            inode: &Self::Inode,
            change: $crate::AttrChange<'_>,
        ) -> $crate::Result<()> {
            $via!(self, inode inode, |below| below.set_attr(inode, change))
        }
    };
    (@get_xattr $via:ident) => {
        fn get_xattr(
            &self,
            inode: &Self::Inode,
            name: &::std::ffi::OsStr,
        ) -> $crate::Result<Vec<u8>> {
            $via!(self, inode inode, |below| below.get_xattr(inode, name))
        }
    };
    (@list_xattr $via:ident) => {
        fn list_xattr(&self, inode: &Self::Inode) -> $crate::Result<Vec<u8>> {
            $via!(self, inode inode, |below| below.list_xattr(inode))
        }
    };

    // Files.
    (@open $via:ident) => {
        fn open(&self, inode: &Self::Inode, access: $crate::Access) -> $crate::Result<Self::File> {
            $via!(self, inode inode, |below| below.open(inode, access))
        }
    };
    (@read_at $via:ident) => {
        fn read_at(&self, file: &Self::File, buf: &mut [u8], offset: u64) -> $crate::Result<usize> {
            $via!(self, file file, |below| below.read_at(file, buf, offset))
        }
    };
    (@write_parts $via:ident) => {
        fn write_parts(
            &self,
            file: &Self::File,
            parts: &[$crate::DataPart<'_>],
        ) -> $crate::Result<u64> {
            $via!(self, file file, |below| below.write_parts(file, parts))
        }
    };
    (@resize $via:ident) => {
        fn resize(&self, file: &Self::File, resize: $crate::Resize) -> $crate::Result<bool> {
            $via!(self, file file, |below| below.resize(file, resize))
        }
    };
    (@allocate $via:ident) => {
        fn allocate(
            &self,
            file: &Self::File,
            mode: i32,
            offset: u64,
            len: u64,
        ) -> $crate::Result<()> {
            $via!(self, file file, |below| below.allocate(file, mode, offset, len))
        }
    };
    (@seek $via:ident) => {
        fn seek(&self, file: &Self::File, offset: u64, what: $crate::Seek) -> $crate::Result<u64> {
            $via!(self, file file, |below| below.seek(file, offset, what))
        }
    };
    (@copy_range $via:ident) => {
        fn copy_range(
            &self,
            from: &Self::File,
            from_offset: u64,
            to: &Self::File,
            to_offset: u64,
            len: u64,
        ) -> $crate::Result<u64> {
            $via!(self, files from to, |below| {
                below.copy_range(from, from_offset, to, to_offset, len)
            })
        }
    };
    (@sync $via:ident) => {
        fn sync(&self, file: &Self::File, data_only: bool) -> $crate::Result<()> {
            $via!(self, file file, |below| below.sync(file, data_only))
        }
    };
    (@advise $via:ident) => {
        fn advise(
            &self,
            file: &Self::File,
            range: ::std::ops::Range<u64>,
            advice: $crate::PageAdvice,
        ) {
            $via!(self, file file, |below| below.advise(file, range, advice))
        }
    };
    (@lock $via:ident) => {
        fn lock(&self, file: &Self::File, request: $crate::LockRequest) -> $crate::Result<bool> {
            $via!(self, file file, |below| below.lock(file, request))
        }
    };
    (@descriptor $via:ident) => {
        fn descriptor(
            &self,
            file: &Self::File,
            purpose: $crate::DescriptorUse,
        ) -> Option<::std::os::fd::OwnedFd> {
            $via!(self, file file, |below| below.descriptor(file, purpose))
        }
    };
    (@adopt $via:ident) => {
        fn adopt(
            &self,
            descriptor: ::std::os::fd::OwnedFd,
        ) -> $crate::Result<$crate::AdoptedBy<Self>> {
            $via!(self, |below| below.adopt(descriptor))
        }
    };

    // Sharing.
    (@kernel_reads $via:ident) => {
        fn kernel_reads(&self, file: &Self::File) -> $crate::KernelReads {
            $via!(self, file file, |below| below.kernel_reads(file))
        }
    };
    (@locate $via:ident) => {
        fn locate(
            &self,
            file: &Self::File,
            range: ::std::ops::Range<u64>,
            limits: $crate::LocateLimits,
        ) -> $crate::Result<Option<$crate::Located>> {
            $via!(self, file file, |below| below.locate(file, range, limits))
        }
    };
    (@report_use $via:ident) => {
        fn report_use(&self, file: &Self::File, what: $crate::FileUse) -> $crate::Result<()> {
            $via!(self, file file, |below| below.report_use(file, what))
        }
    };
    (@level_max $via:ident) => {
        fn level_max(&self, inode: &Self::Inode) -> $crate::DurabilityLevel {
            $via!(self, inode inode, |below| below.level_max(inode))
        }
    };

    // Placement.
    (@facts $via:ident) => {
        fn facts(&self, inode: &Self::Inode) -> $crate::Facts {
            $via!(self, inode inode, |below| below.facts(inode))
        }
    };
    (@lane_of_turn $via:ident) => {
        fn lane_of_turn(&self, turn: u64) -> Option<$crate::LaneIndex> {
            $via!(self, |below| below.lane_of_turn(turn))
        }
    };
}
