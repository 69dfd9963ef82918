//! A directory through which several hosts agree: the first host that creates a file of a name decides its content for
//! all hosts. Examples are whether to commit a transaction, and the name of a lock.
//!
//! To *put* a file is to create it durably with all of its content, if no file of that name exists yet.
//!
//! ```text
//! NAME                     put once by one host; its content counts for all hosts
//! PREFIX-HOST              HOST has reached the step PREFIX
//! put-NAME.HOST.N.new      a file that is being written and will be linked as NAME
//! ```
//!
//! Invariants
//! * A put-once file never changes, so all hosts read the same content.
//! * Assume that two hosts put files of different names and then look for each other's file. At least one host sees
//!   the other's file, because both files are in the same directory and a name exists before its put returns.
//! * A file is complete and durable before it gets its final name.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_backing::{Backing, Errno, RenameFlags};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::own::{self, OwnError, own_caller};

/// Prefix of files that do not have their final name yet.
const PUT_PREFIX: &str = "put-";
/// Prefix of a directory that is being removed.
const REMOVED_PREFIX: &str = "over-";
/// Maximum number of attempts to remove a directory while hosts add files to it. This is far more than the number of
/// files that hosts add before they notice the removal.
const REMOVE_TRIES_MAX: usize = 1000;

/// A vote directory that one of the hosts has opened.
pub struct VoteDir<'a, B: Backing> {
    base: &'a B,
    top: B::Inode,
    name: String,
    dir: B::Inode,
    /// Inode number of the directory.
    ino: u64,
    host: &'a str,
}

impl<'a, B: Backing> VoteDir<'a, B> {
    /// Opens the directory `name` in `top`, through which hosts take one decision. `host` is the name of this host.
    /// Returns `None` if the directory does not exist.
    pub fn find(
        base: &'a B,
        top: &B::Inode,
        name: &str,
        host: &'a str,
    ) -> Result<Option<Self>, OwnError> {
        let found = own::find_dir(base, top, name)?;
        Ok(found.map(|(dir, attr)| Self {
            base,
            top: top.clone(),
            name: name.into(),
            dir,
            ino: attr.ino,
            host,
        }))
    }

    /// Opens the directory `name` in `top`, and creates it durably if it does not exist.
    pub fn make(base: &'a B, top: &B::Inode, name: &str, host: &'a str) -> Result<Self, OwnError> {
        let dir = own::make_dir(base, top, name)?;
        base.sync_dir(top)?;
        Ok(Self {
            base,
            top: top.clone(),
            name: name.into(),
            ino: base.attr(&dir)?.ino,
            dir,
            host,
        })
    }

    /// Returns the backing that contains the directory.
    pub(crate) fn base(&self) -> &'a B {
        self.base
    }

    /// Returns the directory's inode.
    pub fn dir(&self) -> &B::Inode {
        &self.dir
    }

    /// Returns the inode number of the directory.
    pub fn ino(&self) -> u64 {
        self.ino
    }

    /// Returns the name of the directory.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the name of this host.
    pub fn host(&self) -> &str {
        self.host
    }

    /// Returns all names in the directory.
    pub fn names(&self) -> Result<BTreeSet<String>, Errno> {
        let entries = own::list(self.base, &self.dir)?;
        Ok(entries
            .into_iter()
            .map(|(name, ..)| String::from_utf8_lossy(&name).into_owned())
            .collect())
    }

    /// Returns the name of this host's file with the given prefix.
    pub fn own_file(&self, prefix: &str) -> String {
        format!("{prefix}{}", self.host)
    }

    /// Returns the hosts that have a file with the given prefix.
    pub fn hosts(&self, prefix: &str) -> Result<Vec<String>, Errno> {
        Ok(self
            .names()?
            .iter()
            .filter_map(|name| name.strip_prefix(prefix))
            .map(Into::into)
            .collect())
    }

    /// Reads a file. Returns `None` if it does not exist.
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>, OwnError> {
        own::read_file(self.base, &self.dir, name)
    }

    /// Reads a value that [`VoteDir::put_json`] wrote. Returns `None` if the file does not exist.
    pub fn read_json<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, Errno> {
        let Some(bytes) = self.read(name)? else {
            return Ok(None);
        };
        serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|_| Errno::IO)
    }

    /// Creates the file `name` durably with these bytes, unless the name exists already. The file is never changed
    /// later, so all hosts read the same content.
    ///
    /// Returns whether this call created the file. If not, another host's content counts.
    pub fn put_once(&self, name: &str, bytes: &[u8]) -> Result<bool, Errno> {
        let created = if bytes.is_empty() {
            // An empty file is complete as soon as it exists.
            self.base
                .create(&own_caller(), &self.dir, OsStr::new(name), own::FILE_MODE)
                .map(drop)
        } else {
            self.link_once(name, bytes)
        };
        let is_new = match created {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(errno) => return Err(errno),
        };
        self.base.sync_dir(&self.dir)?;
        Ok(is_new)
    }

    /// Writes a file durably and then links it as `name`. Fails with EEXIST if the name exists.
    fn link_once(&self, name: &str, bytes: &[u8]) -> Result<(), Errno> {
        // No other host and no other thread of this host uses the same working name. Two threads of a firnd may put
        // the same file at the same time.
        static PUT_COUNT: AtomicU64 = AtomicU64::new(0);
        let number = PUT_COUNT.fetch_add(1, Ordering::Relaxed);
        let working_name = format!("{PUT_PREFIX}{name}.{}.{number}", self.host);
        own::write_new_file(self.base, &self.dir, &working_name, bytes)?;
        let temporary_name = own::new_name(&working_name);
        let (inode, _attr) = self.base.lookup(&self.dir, OsStr::new(&temporary_name))?;
        let linked = self.base.link(&inode, &self.dir, OsStr::new(name));
        self.base.unlink(&self.dir, OsStr::new(&temporary_name))?;
        linked.map(drop)
    }

    /// Creates an empty file without syncing it. The file must mean nothing after a power loss.
    pub(crate) fn put_hint(&self, name: &str) -> Result<(), Errno> {
        Ok(own::open_or_create(self.base, &self.dir, name).map(drop)?)
    }

    /// Writes a value as JSON by [`VoteDir::put_once`].
    pub fn put_json(&self, name: &str, value: &impl Serialize) -> Result<bool, Errno> {
        let mut bytes = serde_json::to_vec_pretty(value).expect("plain data");
        bytes.push(b'\n');
        self.put_once(name, &bytes)
    }

    /// Removes this host's file with the given prefix, durably.
    pub fn withdraw(&self, prefix: &str) -> Result<(), Errno> {
        self.withdraw_hint(prefix)?;
        self.base.sync_dir(&self.dir)
    }

    /// Removes this host's file with the given prefix, without a sync.
    ///
    /// After a power loss the file may exist again, so the file must mean nothing then.
    pub fn withdraw_hint(&self, prefix: &str) -> Result<(), Errno> {
        let name = self.own_file(prefix);
        match self.base.unlink(&self.dir, OsStr::new(&name)) {
            Ok(()) | Err(Errno::NOENT | Errno::STALE) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    /// Removes files durably. The sync orders this removal before all later ones.
    pub fn remove_files<'n>(&self, names: impl IntoIterator<Item = &'n str>) -> Result<(), Errno> {
        for name in names {
            self.base.unlink(&self.dir, OsStr::new(name))?;
        }
        self.base.sync_dir(&self.dir)
    }

    /// Returns whether the name of the directory still leads to this directory.
    pub fn is_current(&self) -> Result<bool, Errno> {
        own::name_refers_to(self.base, &self.top, &self.name, self.ino)
    }

    /// Removes the directory if it is empty. A host that then tries to put a file into it gets an error, because the
    /// directory is gone.
    pub fn remove_empty(&self) -> Result<(), Errno> {
        match self.base.rmdir(&self.top, OsStr::new(&self.name)) {
            Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(()),
            removed => removed,
        }
    }

    /// Removes the directory atomically for other hosts: under its name they find either all of it or nothing. The
    /// directory is renamed first, and then its content is removed.
    ///
    /// Only one host may call this for a directory.
    pub fn retire(&self) -> Result<(), Errno> {
        let removed_name = format!("{REMOVED_PREFIX}{}.{}", self.name, self.host);
        // An earlier removal by this host may be unfinished.
        remove_dir(self.base, &self.top, &removed_name)?;
        self.base.rename(
            &self.top,
            OsStr::new(&self.name),
            &self.top,
            OsStr::new(&removed_name),
            RenameFlags::empty(),
        )?;
        self.base.sync_dir(&self.top)?;
        remove_dir(self.base, &self.top, &removed_name)
    }

    /// Removes the directories in `top` whose removal by [`VoteDir::retire`] was cut short by the death of a host.
    ///
    /// The dead hosts may never return. If a living host is removing one of these directories at the same time, that
    /// host finds it gone. Directories that Firn does not own are left.
    pub fn remove_retired(base: &B, top: &B::Inode) -> Result<(), Errno> {
        for name in Self::find_retired(base, top)? {
            match own::find_dir(base, top, &name) {
                Ok(_) => remove_dir(base, top, &name)?,
                Err(OwnError::Backing(errno)) => return Err(errno),
                Err(error) => tracing::warn!("cannot finish the removal of a directory: {error}"),
            }
        }
        Ok(())
    }

    /// Returns the names of directories in `top` whose removal by [`VoteDir::retire`] is unfinished.
    pub fn find_retired(base: &B, top: &B::Inode) -> Result<Vec<String>, Errno> {
        let entries = own::list(base, top)?;
        Ok(entries
            .into_iter()
            .map(|(name, ..)| String::from_utf8_lossy(&name).into_owned())
            .filter(|name| Self::is_retired(name))
            .collect())
    }

    /// Returns whether a directory of this name was being removed by [`VoteDir::retire`].
    pub fn is_retired(name: &str) -> bool {
        Self::name_before_retired(name).is_some()
    }

    /// Returns the name that a retired directory had. Returns `None` if `name` is not the name of one.
    pub fn name_before_retired(name: &str) -> Option<&str> {
        name.strip_prefix(REMOVED_PREFIX)?.split('.').next()
    }
}

/// Removes a retired directory.
///
/// A host that opened the directory earlier may still be adding files, so the removal is repeated as long as files
/// appear. Such a host later finds its file gone, as if it had come after the removal.
fn remove_dir<B: Backing>(base: &B, top: &B::Inode, name: &str) -> Result<(), Errno> {
    for _ in 0..REMOVE_TRIES_MAX {
        let Some((dir, _)) = own::find_dir(base, top, name)? else {
            return Ok(());
        };
        let removed = own::clear(base, &dir).and_then(|()| base.rmdir(top, OsStr::new(name)));
        match removed {
            // Another host added a file, or removes the directory too.
            Err(Errno::NOENT | Errno::NOTEMPTY) => {}
            result => return result,
        }
    }
    // The directory no longer has its old name, so no host uses it. The next mount removes it.
    Ok(())
}
