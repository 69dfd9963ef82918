//! A directory in which hosts vote on one thing: a commit, a choice, a removal.
//!
//! ```text
//! NAME                     put once by one host; its content counts for all hosts
//! PREFIX-HOST              HOST has reached the step PREFIX
//! put-NAME.HOST.N.new      a file that is being written, and gets the name NAME
//! ```
//!
//! Invariants
//! * A put-once file never changes: all hosts read the same contents.
//! * Of two hosts that put files of different names and then look for the other's, at least one sees the other's file.
//!   Both files are in the same directory, and a name is there before its put returns.
//! * A file is complete and durable before it gets its name.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_backing::{Backing, Errno, RenameFlags};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::own::{self, OwnError, own_caller};

/// Prefix of files that have not got their name yet.
const PUT: &str = "put-";
/// Prefix of a directory that is being removed.
const RETIRED: &str = "over-";
/// Tries of a removal while hosts add files: far more than the files that they add before they see that it goes.
const REMOVE_TRIES_MAX: usize = 1000;

/// A directory of votes, opened by one of the hosts.
pub struct VoteDir<'a, B: Backing> {
    base: &'a B,
    top: B::Inode,
    name: String,
    dir: B::Inode,
    /// Its inode number.
    ino: u64,
    host: &'a str,
}

impl<'a, B: Backing> VoteDir<'a, B> {
    /// Opens the directory `name` in `top`, if it is there.
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

    /// Opens it, made durably if it is not there.
    pub fn make(base: &'a B, top: &B::Inode, name: &str, host: &'a str) -> Result<Self, OwnError> {
        let dir = own::dir(base, top, name)?;
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

    /// What it is in.
    pub(crate) fn base(&self) -> &'a B {
        self.base
    }

    /// The directory itself.
    pub fn dir(&self) -> &B::Inode {
        &self.dir
    }

    /// The inode number of the directory.
    pub fn ino(&self) -> u64 {
        self.ino
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// This host.
    pub fn host(&self) -> &str {
        self.host
    }

    /// All names in it.
    pub fn names(&self) -> Result<BTreeSet<String>, Errno> {
        let names = own::list(self.base, &self.dir)?.into_iter();
        Ok(names
            .map(|(name, ..)| String::from_utf8_lossy(&name).into_owned())
            .collect())
    }

    /// The name of this host's own file of a kind.
    pub fn own_file(&self, prefix: &str) -> String {
        format!("{prefix}{}", self.host)
    }

    /// The hosts that have a file of a kind.
    pub fn hosts(&self, prefix: &str) -> Result<Vec<String>, Errno> {
        Ok(self
            .names()?
            .iter()
            .filter_map(|name| name.strip_prefix(prefix))
            .map(Into::into)
            .collect())
    }

    /// The bytes of a file, if it is there.
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>, OwnError> {
        own::load(self.base, &self.dir, name)
    }

    /// What [`VoteDir::put_json`] put, if it is there.
    pub fn read_json<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, Errno> {
        let Some(bytes) = self.read(name)? else {
            return Ok(None);
        };
        serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|_| Errno::IO)
    }

    /// Puts a file where there is none, durably; whether it was this one that came first.
    pub fn put_once(&self, name: &str, bytes: &[u8]) -> Result<bool, Errno> {
        let put = match bytes {
            // Whole from the beginning.
            [] => self
                .base
                .create(&own_caller(), &self.dir, OsStr::new(name), 0o600)
                .map(drop),
            _ => self.link_once(name, bytes),
        };
        let is_first = match put {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(errno) => return Err(errno),
        };
        self.base.sync_dir(&self.dir)?;
        Ok(is_first)
    }

    /// Gives a file the name when all its bytes are durable; EEXIST if there is one of that name.
    fn link_once(&self, name: &str, bytes: &[u8]) -> Result<(), Errno> {
        // The working name is that of no other host and of no other thread of this one: two threads of a firnd may
        // put the same file at once.
        static PUTS: AtomicU64 = AtomicU64::new(0);
        let number = PUTS.fetch_add(1, Ordering::Relaxed);
        let working = format!("{PUT}{name}.{}.{number}", self.host);
        own::write(self.base, &self.dir, &working, bytes)?;
        let new = own::new_name(&working);
        let inode = self.base.lookup(&self.dir, OsStr::new(&new))?.0;
        let linked = self.base.link(&inode, &self.dir, OsStr::new(name));
        self.base.unlink(&self.dir, OsStr::new(&new))?;
        linked.map(drop)
    }

    /// Puts an empty file that means nothing after a power loss.
    pub(crate) fn put_hint(&self, name: &str) -> Result<(), Errno> {
        Ok(own::open_or_create(self.base, &self.dir, name).map(drop)?)
    }

    /// [`VoteDir::put_once`] of a value as JSON.
    pub fn put_json(&self, name: &str, value: &impl Serialize) -> Result<bool, Errno> {
        let mut bytes = serde_json::to_vec_pretty(value).expect("plain data");
        bytes.push(b'\n');
        self.put_once(name, &bytes)
    }

    /// Takes this host's own file of a kind away again, durably.
    pub fn withdraw(&self, prefix: &str) -> Result<(), Errno> {
        self.withdraw_hint(prefix)?;
        self.base.sync_dir(&self.dir)
    }

    /// Takes this host's own file of a kind away. After a power loss the file may be there again, so it must mean
    /// nothing then.
    pub fn withdraw_hint(&self, prefix: &str) -> Result<(), Errno> {
        let name = self.own_file(prefix);
        match self.base.unlink(&self.dir, OsStr::new(&name)) {
            Ok(()) | Err(Errno::NOENT | Errno::STALE) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    /// Removes files, durably: nothing that is removed later is gone before them.
    pub fn remove_files<'n>(&self, names: impl IntoIterator<Item = &'n str>) -> Result<(), Errno> {
        for name in names {
            self.base.unlink(&self.dir, OsStr::new(name))?;
        }
        self.base.sync_dir(&self.dir)
    }

    /// Whether its name still leads to it.
    pub fn is_current(&self) -> Result<bool, Errno> {
        let found = own::find(self.base, &self.top, OsStr::new(&self.name))?;
        Ok(found.is_some_and(|(_, attr)| attr.ino == self.ino))
    }

    /// Removes the directory if nothing is in it. A host that is about to put something into it finds it gone.
    pub fn remove_empty(&self) -> Result<(), Errno> {
        match self.base.rmdir(&self.top, OsStr::new(&self.name)) {
            Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(()),
            removed => removed,
        }
    }

    /// Removes the directory so that hosts find all of it or nothing under its name: it gets another name first.
    /// Only one host may do this for a directory.
    pub fn retire(&self) -> Result<(), Errno> {
        let retired = format!("{RETIRED}{}.{}", self.name, self.host);
        remove_dir(self.base, &self.top, &retired)?;
        self.base.rename(
            &self.top,
            OsStr::new(&self.name),
            &self.top,
            OsStr::new(&retired),
            RenameFlags::empty(),
        )?;
        self.base.sync_dir(&self.top)?;
        remove_dir(self.base, &self.top, &retired)
    }

    /// Removes the directories in `top` that hosts were removing by [`VoteDir::retire`] when they died, as those hosts may
    /// never come back. A live host that is removing one at the same time finds it gone. What is not Firn's own is left.
    pub fn remove_retired(base: &B, top: &B::Inode) -> Result<(), Errno> {
        for name in Self::find_retired(base, top)? {
            match own::find_dir(base, top, &name) {
                Ok(_) => remove_dir(base, top, &name)?,
                Err(OwnError::Backing(errno)) => return Err(errno),
                Err(error) => tracing::warn!("a directory that was being removed is left: {error}"),
            }
        }
        Ok(())
    }

    /// The names of these directories.
    pub fn find_retired(base: &B, top: &B::Inode) -> Result<Vec<String>, Errno> {
        let names = own::list(base, top)?.into_iter();
        let names = names.map(|(name, ..)| String::from_utf8_lossy(&name).into_owned());
        Ok(names.filter(|name| Self::is_retired(name)).collect())
    }

    /// Whether this is the name of such a directory.
    pub fn is_retired(name: &str) -> bool {
        Self::name_before_retired(name).is_some()
    }

    /// The name that such a directory had; `None` if this is not the name of one.
    pub fn name_before_retired(name: &str) -> Option<&str> {
        name.strip_prefix(RETIRED)?.split('.').next()
    }
}

/// Removes a retired directory. A host that opened it before may still be putting something into it, so the removal is
/// repeated while that goes on. Such a host finds its file gone, as if it had come later.
fn remove_dir<B: Backing>(base: &B, top: &B::Inode, name: &str) -> Result<(), Errno> {
    for _ in 0..REMOVE_TRIES_MAX {
        let Some((dir, _)) = own::find_dir(base, top, name)? else {
            return Ok(());
        };
        match own::clear(base, &dir).and_then(|()| base.rmdir(top, OsStr::new(name))) {
            Err(Errno::NOENT | Errno::NOTEMPTY) => {}
            done => return done,
        }
    }
    // The directory has lost its old name: it means nothing, and the next mount removes it.
    Ok(())
}
