//! What programs see of a mount: a FUSE session, or a stub tree.

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
use crate::mount_users::Mounts;
use crate::runtime_files::waiting_tree;
use crate::store::Store;

/// How long descriptors of processes that ended may still be known.
const RELEASE_PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(5);

/// How programs come in.
pub(crate) enum Frontend {
    Mount(Arc<Session>),
    Tree(Arc<Stubs>),
}

/// A stub tree and what is written down of it.
pub(crate) struct Stubs {
    pub(crate) tree: Arc<Tree<Store>>,
    files: RuntimeFiles,
    events: Sender<Event>,
}

/// What becomes of a stub tree when its firnd ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TreeEnd {
    /// Its names are carried over to the backing; it stays, because what it tells of is still held.
    Keep,
    /// Its names are carried over, and it is removed.
    Remove,
    /// The tree is removed as it is; names that are not in the backing are dropped.
    Discard,
}

impl Stubs {
    /// Begins a tree at `prefix`, or goes on with that of an earlier firnd. Programs do not find it before
    /// [`Stubs::publish`].
    pub(crate) fn begin(
        engine: Arc<Engine<Store>>,
        backing: &Path,
        prefix: &Path,
        places_by_name: bool,
        files: &RuntimeFiles,
        events: Sender<Event>,
    ) -> Result<Self, AttachError> {
        let mounted = check_place(prefix, &files.names)?;
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
                if mounted {
                    let _ = unmount(prefix, UnmountFlags::DETACH);
                }
                Err(error.into())
            }
        }
    }

    /// Tells the preload library and `firn` of the tree. `shares_files`: other hosts use them, too.
    pub(crate) fn publish(
        &self,
        shares_files: bool,
        arena: [u8; 16],
        socket: &Path,
        backing: &Path,
    ) -> Result<(), AttachError> {
        let (device, _) = self.tree.identity();
        let long = || {
            AttachError::io("write down where the stub tree is")(io::Error::from_raw_os_error(
                libc::ENAMETOOLONG,
            ))
        };
        let mut place = [0; 112];
        let bytes = std::os::unix::ffi::OsStrExt::as_bytes(socket.as_os_str());
        place
            .get_mut(..bytes.len())
            .filter(|_| bytes.len() < 108)
            .ok_or_else(long)?
            .copy_from_slice(bytes);
        let tree = StubTree {
            magic: STUB_MAGIC,
            device_major: major(device),
            device_minor: minor(device),
            whole_device: u32::from(self.tree.is_whole_device()),
            pid: std::process::id(),
            refuses_locks: u32::from(shares_files),
            unused: 0,
            arena,
            socket: place,
            prefix: trees::path_bytes(self.tree.root()).ok_or_else(long)?,
            backing: trees::path_bytes(backing).ok_or_else(long)?,
        };
        trees::write(&self.files.stub, &tree)
            .map_err(AttachError::io("write down where the stub tree is"))
    }

    /// The last step, when nothing more comes.
    pub(crate) fn end(&self, end: TreeEnd) {
        if end != TreeEnd::Discard
            && let Err(error) = self.tree.reconcile()
        {
            tracing::error!(%error, "the stub tree stays for the next mount: not every name could be created in the backing");
        } else if end != TreeEnd::Keep {
            self.remove();
        }
    }

    fn remove(&self) {
        let root = self.tree.root().to_owned();
        if let Err(error) = self.tree.remove() {
            tracing::warn!(%error, "cannot remove the stub tree");
        }
        forget_place(&root, &self.files);
    }
}

/// Removes what leads to the tree.
fn forget_place(root: &Path, files: &RuntimeFiles) {
    let _ = std::fs::remove_file(&files.stub);
    // Where the user's own tmpfs has its root here, it is only emptied: unmounting is refused while
    // programs use it, so the lazy way.
    if is_made_by_firnd(root) {
        let _ = unmount(root, UnmountFlags::DETACH);
    }
}

/// Removes the stub tree that a killed firnd left, with the names in it, if there is one. The backing is not asked.
pub(crate) fn discard_tree(files: &RuntimeFiles) -> Result<(), AttachError> {
    let Some(root) = waiting_tree(files)? else {
        return Ok(());
    };
    remove_left_tree(&root, &files.names)
        .map_err(AttachError::io("remove the stub tree that firnd left"))?;
    forget_place(&root, files);
    Ok(())
}

/// Whether the mount at a path was made by firnd.
fn is_made_by_firnd(root: &Path) -> bool {
    let text = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    let entries = mountinfo::parse(&text);
    mountinfo::on_top(&entries, root)
        .is_some_and(|entry| entry.fs_type == "tmpfs" && entry.source == Path::new("firn"))
}

impl Frontend {
    /// What brings the names of a stub tree into the backing, for a caller that may wait for that.
    pub(crate) fn names(&self) -> impl FnOnce() -> Result<(), Errno> + Send + 'static {
        let tree = match self {
            Self::Mount(_) => None,
            Self::Tree(stubs) => Some(Arc::clone(&stubs.tree)),
        };
        move || tree.map_or(Ok(()), |tree| tree.reconcile())
    }

    /// Mounts of the file system, in all namespaces; None for a stub tree, and where they are unknown.
    pub(crate) fn mounts(&self) -> Option<Mounts> {
        match self {
            Self::Mount(session) => Some(Mounts::of(session.device()?, session.mount_point())),
            Self::Tree(_) => None,
        }
    }

    /// Takes it away; EBUSY where programs use it.
    pub(crate) fn unmount(&self, lazy: bool) -> io::Result<()> {
        match self {
            Self::Mount(session) => session.unmount(lazy),
            Self::Tree(stubs) => {
                // The kernel closes what a process had before its end is reported, firnd soon after.
                let deadline = Instant::now() + RELEASE_PATIENCE;
                while !lazy && stubs.tree.open_count() > 0 && Instant::now() < deadline {
                    std::thread::sleep(PAUSE);
                }
                if !lazy && stubs.tree.open_count() > 0 {
                    return Err(io::Error::from_raw_os_error(libc::EBUSY));
                }
                stubs.tree.close();
                let _ = stubs.events.send(Event::Ended);
                Ok(())
            }
        }
    }

    /// Ends it for the programs that use it.
    pub(crate) fn abort(&self) -> io::Result<()> {
        match self {
            Self::Mount(session) => session.abort(),
            Self::Tree(_) => Ok(()),
        }
    }
}
