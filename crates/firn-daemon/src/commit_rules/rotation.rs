//! `keep=N` of a rule: removes old complete checkpoints once a newer one is durable.
//!
//! The thread of the rules does this, so no program waits. All files of a checkpoint are removed in one transaction of
//! its names: if firnd is killed meanwhile, the checkpoint is either complete or gone.
//!
//! The files are removed by the engine's unlink, so a program that has one open can still read it.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use firn_backing::{Errno, Kind, join_path};
use firn_engine::{Cached, InodeId, ROOT};
use firn_rules::{LocatedPath, ScopeNumber, parent_of};
use firn_transact::machine::Pending;

use super::{CommitRules, Transaction, join_paths, last_name, log_and_get_errno};

/// An object of the mount that was looked up. Its drop ends the lookup in the engine.
struct LookedUpInode<'a> {
    rules: &'a CommitRules,
    inode: InodeId,
}

impl Drop for LookedUpInode<'_> {
    fn drop(&mut self) {
        if self.inode != ROOT {
            self.rules.gate.engine().namespace.forget(self.inode, 1);
        }
    }
}

/// A name in a directory, and the kind of object that it names.
struct ListedName {
    name: OsString,
    kind: Kind,
}

impl CommitRules {
    /// Removes old checkpoints in each directory where a checkpoint was committed. A failure is logged, and the
    /// checkpoints stay until the next commit.
    pub(super) fn rotate(&self) {
        loop {
            let Some((rule, dir)) = self.table.lock().rotations.pop_first() else {
                return;
            };
            if let Err(errno) = self.rotate_in(rule, &dir) {
                let dir = String::from_utf8_lossy(&dir);
                tracing::warn!(%errno, %dir, "old checkpoints stay until the next one is committed");
            }
        }
    }

    /// Removes the old checkpoints of one rule in one directory.
    fn rotate_in(&self, rule: usize, dir: &[u8]) -> Result<(), Errno> {
        let found = self.find_dir(dir)?;
        let mut names: Vec<LocatedPath> = Vec::new();
        let mut linked = BTreeSet::new();
        for ListedName { name, kind } in self.list(found.inode)? {
            names.push(self.rules.locate(&join_path(dir, &name)));
            if kind == Kind::Symlink {
                linked.extend(self.first_name_of_link(&found, dir, &name));
            }
        }
        let mut table = self.table.lock();
        let actions = table.machine.rotate(rule, dir, &names, &linked);
        self.publish(table);
        self.carry_out(actions)
    }

    /// Returns the path in `dir` that a link there leads to or into; `None` if the link cannot be read.
    fn first_name_of_link(
        &self,
        dir: &LookedUpInode<'_>,
        path: &[u8],
        name: &OsStr,
    ) -> Option<Vec<u8>> {
        let link = self.look_up(dir.inode, name).ok()?;
        let target = self.gate.engine().namespace.readlink(link.inode).ok()?;
        let mut parts = target.split(|byte| *byte == b'/');
        let first = parts.find(|part| !matches!(*part, b"" | b"."))?;
        // The target of an absolute link is outside of this mount's paths; its last name is taken as that of a
        // checkpoint.
        let is_absolute = target.starts_with(b"/");
        let first = if is_absolute {
            target.rsplit(|byte| *byte == b'/').next()?
        } else {
            first
        };
        Some(join_path(path, OsStr::from_bytes(first)))
    }

    fn look_up(&self, parent: InodeId, name: &OsStr) -> Result<LookedUpInode<'_>, Errno> {
        let entry = self.gate.engine().namespace.lookup(parent, name)?;
        Ok(LookedUpInode {
            rules: self,
            inode: entry.inode,
        })
    }

    /// Looks up the directory at `path`.
    fn find_dir(&self, path: &[u8]) -> Result<LookedUpInode<'_>, Errno> {
        let mut at = LookedUpInode {
            rules: self,
            inode: ROOT,
        };
        for name in path
            .split(|byte| *byte == b'/')
            .filter(|name| !name.is_empty())
        {
            at = self.look_up(at.inode, OsStr::from_bytes(name))?;
        }
        Ok(at)
    }

    /// Lists a directory. A kind that the listing lacks is looked up.
    fn list(&self, dir: InodeId) -> Result<Vec<ListedName>, Errno> {
        let namespace = &self.gate.engine().namespace;
        let handle = namespace.open_dir(dir)?;
        let mut names = Vec::new();
        let read = namespace.read_dir(handle, 0, &mut |entry| {
            names.push((entry.name.to_owned(), entry.kind));
            true
        });
        namespace.release_dir(handle);
        read?;
        let mut listed = Vec::new();
        for (name, kind) in names {
            if name == "." || name == ".." {
                continue;
            }
            let kind = match kind {
                Some(kind) => kind,
                None => {
                    let entry = namespace.lookup(dir, &name)?;
                    namespace.forget(entry.inode, 1);
                    entry.attr.kind
                }
            };
            listed.push(ListedName { name, kind });
        }
        Ok(listed)
    }

    /// Removes a complete checkpoint in a transaction of its own, and counts the removal or the failure.
    pub(super) fn remove(
        &self,
        scope: ScopeNumber,
        rule: &str,
        (tops, key): (Vec<Vec<u8>>, Vec<u8>),
    ) -> Result<(), Errno> {
        let paths: BTreeSet<Vec<u8>> = tops.into_iter().collect();
        let removed = self.remove_names(scope, rule, (&paths, key));
        if removed.is_ok() && self.has_other_hosts() {
            // With several hosts the removal is counted when the hosts have committed it.
            self.wake_hosts();
            return Ok(());
        }
        let mut table = self.table.lock();
        let counts = table.counts.entry(rule.to_owned()).or_default();
        let more = match &removed {
            Ok(()) => {
                counts.removals += 1;
                table.machine.note_committed(scope)
            }
            Err(_) => {
                counts.failures += 1;
                table.machine.note_aborted(scope);
                Vec::new()
            }
        };
        self.publish(table);
        if removed.is_ok() {
            tracing::info!(rule, paths = %join_paths(&paths), "a commit rule has removed an old checkpoint");
        }
        removed.and_then(|()| self.carry_out(more))
    }

    /// Removes the names of a checkpoint in a transaction, and commits it, or aborts it after a failure.
    fn remove_names(
        &self,
        scope: ScopeNumber,
        rule: &str,
        (paths, key): (&BTreeSet<Vec<u8>>, Vec<u8>),
    ) -> Result<(), Errno> {
        let Some(first) = paths.first() else {
            return Ok(());
        };
        let dir = parent_of(first).to_vec();
        let names: Vec<OsString> = paths.iter().map(|path| last_name(path)).collect();
        let begun = self
            .gate
            .quiesce_names(&dir, paths, Pending::Drain, |root| {
                let begun = self.gate.store().begin_names(root, &dir, &names, &key);
                Ok(begun?.serial())
            });
        let transaction = Transaction {
            rule: rule.to_owned(),
            serial: begun.map_err(|error| log_and_get_errno(&error))?,
            dir,
            paths: paths.clone(),
            key,
            is_rotation: true,
        };
        let removed = self.remove_trees(&transaction.dir, &names);
        let ended = match removed {
            Ok(()) if self.has_other_hosts() => {
                self.propose_removal(scope, &transaction);
                Ok(())
            }
            Ok(()) => self.commit_transaction(&transaction),
            Err(_) => self.abort_transaction(&transaction),
        };
        let dir = self.find_dir(&transaction.dir)?;
        for name in names {
            (self.invalidate_cache)(Cached::Name {
                parent: dir.inode,
                name,
            });
        }
        removed.and(ended.map_err(|error| log_and_get_errno(&error)))
    }

    /// Proposes a removal to the other hosts. It is a scope of its own, in which this host alone has a part.
    ///
    /// A host that changes a file of the checkpoint meanwhile takes part too; the result is a conflict, and the
    /// checkpoint stays.
    fn propose_removal(&self, scope: ScopeNumber, transaction: &Transaction) {
        let mut table = self.table.lock();
        table.scopes.insert(scope, transaction.clone());
        table.machine.note_removal_made(scope);
        self.publish(table);
    }

    /// Removes the trees of some names in a directory. A name that is gone already counts as removed.
    fn remove_trees(&self, dir: &[u8], names: &[OsString]) -> Result<(), Errno> {
        let dir = self.find_dir(dir)?;
        for name in names {
            match self.gate.engine().namespace.lookup(dir.inode, name) {
                Ok(entry) => {
                    let found = LookedUpInode {
                        rules: self,
                        inode: entry.inode,
                    };
                    self.remove_tree(dir.inode, name, (&found, entry.attr.kind))?;
                }
                Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Removes an object, and what is below it if it is a directory.
    fn remove_tree(
        &self,
        parent: InodeId,
        name: &OsStr,
        (found, kind): (&LookedUpInode<'_>, Kind),
    ) -> Result<(), Errno> {
        let namespace = &self.gate.engine().namespace;
        if kind != Kind::Dir {
            return namespace.unlink(parent, name);
        }
        for ListedName { name, kind } in self.list(found.inode)? {
            let below = self.look_up(found.inode, &name)?;
            self.remove_tree(found.inode, &name, (&below, kind))?;
        }
        namespace.rmdir(parent, name)
    }
}
