//! The frontend of a mount, through which programs use it: a FUSE session, or a stub tree.
//!
//! A stub tree is a directory of empty files on tmpfs. The preload library serves the programs that use it.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use firn_backing::Errno;
use firn_client::RuntimeFiles;
use firn_client::trees;
use firn_engine::Engine;
use firn_format::data_socket::{STUB_MAGIC, StubTree};
use firn_format::mountinfo;
use firn_fuse::Session;
use firn_stub::{Tree, TreeOptions, check_place, remove_left_tree};
use rustix::fs::{major, minor};
use rustix::mount::{UnmountFlags, unmount};

use crate::error::AttachError;
use crate::event::Event;
use crate::mount_users::FileSystemMounts;
use crate::runtime_files::waiting_tree;
use crate::store::Store;

/// Time in which descriptors of ended processes may still count as open.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);
const RELEASE_CHECK_EVERY: Duration = Duration::from_millis(5);
/// Length of the field of the socket's path in [`StubTree`].
const SOCKET_FIELD_BYTES: usize = 112;
/// Length of the path in a socket address (unix(7)), with the zero byte at its end.
const SOCKET_PATH_BYTES_MAX: usize = 108;

/// How programs use the mount.
pub(crate) enum Frontend {
    Mount(Arc<Session>),
    Tree(Arc<Stubs>),
}

/// A stub tree, and the files in the runtime directory that describe it.
pub(crate) struct Stubs {
    pub(crate) tree: Arc<Tree<Store>>,
    files: RuntimeFiles,
    events: Sender<Event>,
}

/// What happens to a stub tree at the end of its firnd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TreeEnd {
    /// Its names are created in the backing. The tree stays, because the arena still holds data of its files.
    Keep,
    /// Its names are created in the backing, and the tree is removed.
    Remove,
    /// The tree is removed at once; names that are not in the backing are lost.
    Discard,
}

impl Stubs {
    /// Begins a stub tree (empty files on tmpfs; the preload library serves their bytes) at `prefix`, or continues the
    /// tree of an earlier firnd. Programs do not find it before [`Stubs::publish`]. After a failure, a tmpfs that was
    /// mounted here is unmounted.
    ///
    /// `places_by_name` says that a file's name decides on which I/O server it lies.
    pub(crate) fn begin(
        engine: Arc<Engine<Store>>,
        backing: &Path,
        prefix: &Path,
        places_by_name: bool,
        files: &RuntimeFiles,
        events: Sender<Event>,
    ) -> Result<Self, AttachError> {
        // This mounts a tmpfs at `prefix` if that is needed.
        let has_mounted_tmpfs = check_place(prefix, &files.names)?;
        let options = TreeOptions {
            root: prefix.to_owned(),
            log: files.names.clone(),
            backing: backing.to_owned(),
            places_by_name,
        };
        match Tree::begin(engine, options) {
            Ok(tree) => Ok(Self {
                tree: Arc::new(tree),
                files: files.clone(),
                events,
            }),
            Err(error) => {
                if has_mounted_tmpfs {
                    // The tree could not be begun; that error is returned.
                    let _ = unmount(prefix, UnmountFlags::DETACH);
                }
                Err(error.into())
            }
        }
    }

    /// Writes the file by which the preload library and `firn` find the stub tree, its data socket `socket` and the
    /// arena (the shared memory) with the id `arena`. `shares_files` says that other hosts use the same files; the
    /// library then refuses locks. Fails if a path is too long for its field.
    pub(crate) fn publish(
        &self,
        shares_files: bool,
        arena: [u8; 16],
        socket: &Path,
        backing: &Path,
    ) -> Result<(), AttachError> {
        let (device, _) = self.tree.identity();
        let too_long = || {
            AttachError::io("store the path of the stub tree")(io::Error::from_raw_os_error(
                libc::ENAMETOOLONG,
            ))
        };
        let socket_bytes = std::os::unix::ffi::OsStrExt::as_bytes(socket.as_os_str());
        if socket_bytes.len() >= SOCKET_PATH_BYTES_MAX {
            return Err(too_long());
        }
        let mut socket_path = [0; SOCKET_FIELD_BYTES];
        socket_path[..socket_bytes.len()].copy_from_slice(socket_bytes);
        let tree = StubTree {
            magic: STUB_MAGIC,
            device_major: major(device),
            device_minor: minor(device),
            whole_device: u32::from(self.tree.is_whole_device()),
            pid: std::process::id(),
            refuses_locks: u32::from(shares_files),
            unused: 0,
            arena,
            socket: socket_path,
            prefix: trees::path_bytes(self.tree.root()).ok_or_else(too_long)?,
            backing: trees::path_bytes(backing).ok_or_else(too_long)?,
        };
        trees::write(&self.files.stub, &tree)
            .map_err(AttachError::io("store the path of the stub tree"))
    }

    /// Ends the tree. This is the last step, when no request comes any more. If a name cannot be created, the tree
    /// stays for the next mount.
    pub(crate) fn end(&self, end: TreeEnd) {
        if end != TreeEnd::Discard
            && let Err(error) = self.tree.reconcile()
        {
            tracing::error!(%error, "the stub tree stays for the next mount: not every name could be created in the backing");
            return;
        }
        if end != TreeEnd::Keep {
            self.remove();
        }
    }

    /// Closes the tree, and reports the end of the frontend to the main loop.
    fn close_tree(&self) {
        self.tree.close();
        let _ = self.events.send(Event::Ended);
    }

    /// Waits until no program has a stub open. Fails with EBUSY after [`RELEASE_TIMEOUT`].
    ///
    /// The kernel closes the files of a process before its end is reported, and firnd is notified soon after.
    fn wait_until_unused(&self) -> io::Result<()> {
        let deadline = Instant::now() + RELEASE_TIMEOUT;
        while self.tree.open_count() > 0 {
            if Instant::now() >= deadline {
                return Err(io::Error::from_raw_os_error(libc::EBUSY));
            }
            std::thread::sleep(RELEASE_CHECK_EVERY);
        }
        Ok(())
    }

    /// Removes the tree and the files that describe it.
    fn remove(&self) {
        let root = self.tree.root().to_owned();
        if let Err(error) = self.tree.remove() {
            tracing::warn!(%error, "cannot remove the stub tree");
        }
        unmount_made_tmpfs(&root, &self.files);
    }
}

/// Removes the file that describes a tree, and unmounts the tmpfs if firnd has mounted it.
fn unmount_made_tmpfs(root: &Path, files: &RuntimeFiles) {
    let _ = std::fs::remove_file(&files.stub);
    // A tmpfs that the user has mounted here stays. The unmount is lazy, because an unmount fails while programs use
    // the directory.
    if is_mounted_by_firnd(root) {
        let _ = unmount(root, UnmountFlags::DETACH);
    }
}

/// Removes the stub tree of a killed firnd, if there is one, with names that are not in the backing. The backing is not
/// used.
pub(crate) fn discard_tree(files: &RuntimeFiles) -> Result<(), AttachError> {
    let Some(root) = waiting_tree(files)? else {
        return Ok(());
    };
    remove_left_tree(&root, &files.names)
        .map_err(AttachError::io("remove the stub tree of the ended firnd"))?;
    unmount_made_tmpfs(&root, files);
    Ok(())
}

/// Returns whether firnd has mounted the file system at a path.
fn is_mounted_by_firnd(root: &Path) -> bool {
    let text = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    let entries = mountinfo::parse(&text);
    mountinfo::on_top(&entries, root)
        .is_some_and(|entry| entry.fs_type == "tmpfs" && entry.source == Path::new("firn"))
}

impl Frontend {
    /// Returns a function that creates the names of a stub tree in the backing. It may wait for the backing.
    pub(crate) fn names_creator(&self) -> impl FnOnce() -> Result<(), Errno> + Send + 'static {
        let tree = match self {
            Self::Mount(_) => None,
            Self::Tree(stubs) => Some(Arc::clone(&stubs.tree)),
        };
        move || tree.map_or(Ok(()), |tree| tree.reconcile())
    }

    /// Returns the mounts of the file system in all namespaces; `None` for a stub tree, or if they cannot be read.
    pub(crate) fn mounts(&self) -> Option<FileSystemMounts> {
        match self {
            Self::Mount(session) => Some(FileSystemMounts::find(
                session.device()?,
                session.mount_point(),
            )),
            Self::Tree(_) => None,
        }
    }

    /// Unmounts; fails with EBUSY if programs use the mount.
    pub(crate) fn unmount(&self) -> io::Result<()> {
        match self {
            Self::Mount(session) => {
                let lazy = false;
                session.unmount(lazy)
            }
            Self::Tree(stubs) => {
                stubs.wait_until_unused()?;
                stubs.close_tree();
                Ok(())
            }
        }
    }

    /// Unmounts even while programs use the mount.
    pub(crate) fn unmount_lazily(&self) -> io::Result<()> {
        match self {
            Self::Mount(session) => {
                let lazy = true;
                session.unmount(lazy)
            }
            Self::Tree(stubs) => {
                stubs.close_tree();
                Ok(())
            }
        }
    }

    /// Aborts the connection, so that programs lose the mount. For a stub tree this does nothing.
    pub(crate) fn abort(&self) -> io::Result<()> {
        match self {
            Self::Mount(session) => session.abort(),
            Self::Tree(_) => Ok(()),
        }
    }
}
