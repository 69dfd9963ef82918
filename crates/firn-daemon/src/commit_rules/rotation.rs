//! `keep=N` of a rule: removes old complete checkpoints once a newer one is durable.
//!
//! The thread of the commit rules does this, so no program waits. All files of a checkpoint are removed in one
//! transaction of its names. If firnd (the process that serves the mount) is killed meanwhile, the checkpoint is either
//! complete or gone.
//!
//! The files are removed by the engine's unlink, so a program that has one open can still read it.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use firn_backing::{Errno, Kind, join_path};
use firn_engine::{Cached, InodeId, ROOT};
use firn_rules::{LocatedPath, ScopeNumber, parent_of};
use firn_transact::machine::Pending;

use super::{
    CheckpointNames, CommitRules, Transaction, describe_paths, last_name, log_and_get_errno,
};

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
            if let Err(errno) = self.remove_old_checkpoints_in(rule, &dir) {
                let dir = String::from_utf8_lossy(&dir);
                tracing::warn!(%errno, %dir, "cannot remove old checkpoints; they stay until the next one is \
                    committed");
            }
        }
    }

    /// Removes the old checkpoints of one commit rule in one directory: complete ones beyond the number that the rule
    /// keeps. A checkpoint that a symbolic link of the directory leads to stays.
    fn remove_old_checkpoints_in(&self, rule: usize, dir: &[u8]) -> Result<(), Errno> {
        let looked_up = self.look_up_dir(dir)?;
        let mut names: Vec<LocatedPath> = Vec::new();
        // A link such as `latest` keeps the checkpoint that it leads to.
        let mut link_targets = BTreeSet::new();
        for ListedName { name, kind } in self.list_dir(looked_up.inode)? {
            names.push(self.rules.locate(&join_path(dir, &name)));
            if kind == Kind::Symlink {
                link_targets.extend(self.path_of_link_target(&looked_up, dir, &name));
            }
        }
        let mut table = self.table.lock();
        let actions = table.machine.rotate(rule, dir, &names, &link_targets);
        self.unlock_and_notify(table);
        self.carry_out(actions)
    }

    /// Returns the path in `dir` that a symbolic link there leads to or into, such as the checkpoint behind `latest`;
    /// `None` if the link cannot be read. The path need not exist.
    fn path_of_link_target(
        &self,
        looked_up_dir: &LookedUpInode<'_>,
        dir: &[u8],
        link_name: &OsStr,
    ) -> Option<Vec<u8>> {
        let link = self.look_up(looked_up_dir.inode, link_name).ok()?;
        let target = self.gate.engine().namespace.readlink(link.inode).ok()?;
        let mut components = target.split(|byte| *byte == b'/');
        let first_name = components.find(|name| !matches!(*name, b"" | b"."))?;
        // The target of an absolute link is outside of this mount's paths; its last name is taken as that of a
        // checkpoint.
        let is_absolute = target.starts_with(b"/");
        let name_in_dir = if is_absolute {
            target.rsplit(|byte| *byte == b'/').next()?
        } else {
            first_name
        };
        Some(join_path(dir, OsStr::from_bytes(name_in_dir)))
    }

    /// Looks up a name in a directory. Fails with ENOENT if there is no such name.
    fn look_up(&self, parent: InodeId, name: &OsStr) -> Result<LookedUpInode<'_>, Errno> {
        let entry = self.gate.engine().namespace.lookup(parent, name)?;
        Ok(LookedUpInode {
            rules: self,
            inode: entry.inode,
        })
    }

    /// Looks up the directory at `path`.
    fn look_up_dir(&self, path: &[u8]) -> Result<LookedUpInode<'_>, Errno> {
        let mut dir = LookedUpInode {
            rules: self,
            inode: ROOT,
        };
        let names = path.split(|byte| *byte == b'/');
        for name in names.filter(|name| !name.is_empty()) {
            dir = self.look_up(dir.inode, OsStr::from_bytes(name))?;
        }
        Ok(dir)
    }

    /// Lists a directory of the mount with the kind of each object. A kind that the listing lacks is looked up, and
    /// that lookup is ended (`forget`).
    fn list_dir(&self, dir: InodeId) -> Result<Vec<ListedName>, Errno> {
        let namespace = &self.gate.engine().namespace;
        let handle = namespace.open_dir(dir)?;
        let mut entries = Vec::new();
        let read_result = namespace.read_dir(handle, 0, &mut |entry| {
            entries.push((entry.name.to_owned(), entry.kind));
            true
        });
        namespace.release_dir(handle);
        read_result?;
        let mut listed = Vec::new();
        for (name, kind) in entries {
            if name == "." || name == ".." {
                continue;
            }
            let kind = match kind {
                Some(kind) => kind,
                None => {
                    let entry = namespace.lookup(dir, &name)?;
                    // Without this call, the engine would count the lookup and keep the object in memory.
                    namespace.forget(entry.inode, 1);
                    entry.attr.kind
                }
            };
            listed.push(ListedName { name, kind });
        }
        Ok(listed)
    }

    /// Removes a complete old checkpoint in a transaction of its own, so that it disappears as one, and counts the
    /// removal or the failure. `paths` are the paths of its names; `key` is how other hosts identify it.
    pub(super) fn remove_checkpoint(
        &self,
        scope: ScopeNumber,
        rule: &str,
        CheckpointNames { paths, key }: CheckpointNames,
    ) -> Result<(), Errno> {
        let paths: BTreeSet<Vec<u8>> = paths.into_iter().collect();
        let removed = self.remove_in_transaction(scope, rule, &paths, key);
        if removed.is_ok() && self.has_other_hosts() {
            // With several hosts the removal is counted when the hosts have committed it.
            self.wake_joint_commit_thread();
            return Ok(());
        }
        let mut table = self.table.lock();
        let counts = table.counts.entry(rule.to_owned()).or_default();
        if let Err(errno) = removed {
            counts.failures += 1;
            table.machine.record_aborted(scope);
            self.unlock_and_notify(table);
            return Err(errno);
        }
        counts.removals += 1;
        let next_actions = table.machine.record_committed(scope);
        self.unlock_and_notify(table);
        tracing::info!(rule, paths = %describe_paths(&paths), "a commit rule has removed an old checkpoint");
        self.carry_out(next_actions)
    }

    /// Removes the names of a checkpoint, and all below them, in a transaction that is committed, or aborted after a
    /// failure. With other hosts the commit is only proposed to them. At the end the kernel drops what it has cached of
    /// the names.
    fn remove_in_transaction(
        &self,
        scope: ScopeNumber,
        rule: &str,
        paths: &BTreeSet<Vec<u8>>,
        key: Vec<u8>,
    ) -> Result<(), Errno> {
        let Some(first_path) = paths.first() else {
            return Ok(());
        };
        let dir = parent_of(first_path).to_vec();
        let names: Vec<OsString> = paths.iter().map(|path| last_name(path)).collect();
        let begin_result = self
            .gate
            .quiesce_names(&dir, paths, Pending::Drain, |root| {
                let transaction = self.gate.store().begin_names(root, &dir, &names, &key)?;
                Ok(transaction.serial())
            });
        let serial = begin_result.map_err(|error| log_and_get_errno(&error))?;
        let transaction = Transaction {
            rule: rule.to_owned(),
            serial,
            dir,
            paths: paths.clone(),
            key,
            is_removal: true,
        };
        let removed = self.remove_trees(&transaction.dir, &names);
        let end_result = match removed {
            Ok(()) if self.has_other_hosts() => {
                self.propose_removal(scope, &transaction);
                Ok(())
            }
            Ok(()) => self.commit_transaction(&transaction),
            Err(_) => self.abort_transaction(&transaction),
        };
        let looked_up_dir = self.look_up_dir(&transaction.dir)?;
        for name in names {
            (self.invalidate_cache)(Cached::Name {
                parent: looked_up_dir.inode,
                name,
            });
        }
        // The failure of the removal is returned before that of the transaction's end.
        removed.and(end_result.map_err(|error| log_and_get_errno(&error)))
    }

    /// Proposes a removal to the other hosts. It is a scope of its own, in which this host alone has a part.
    ///
    /// A host that changes a file of the checkpoint meanwhile takes part too; the result is a conflict, and the
    /// checkpoint stays.
    fn propose_removal(&self, scope: ScopeNumber, transaction: &Transaction) {
        let mut table = self.table.lock();
        table.scopes.insert(scope, transaction.clone());
        table.machine.record_removal_made(scope);
        self.unlock_and_notify(table);
    }

    /// Removes some names in a directory and all below them. A name that is gone already counts as removed. After an
    /// error some of them remain; the caller's transaction undoes the removal.
    fn remove_trees(&self, dir: &[u8], names: &[OsString]) -> Result<(), Errno> {
        let dir = self.look_up_dir(dir)?;
        for name in names {
            match self.gate.engine().namespace.lookup(dir.inode, name) {
                Ok(entry) => {
                    let object = LookedUpInode {
                        rules: self,
                        inode: entry.inode,
                    };
                    self.remove_tree(dir.inode, name, &object, entry.attr.kind)?;
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
        object: &LookedUpInode<'_>,
        kind: Kind,
    ) -> Result<(), Errno> {
        let namespace = &self.gate.engine().namespace;
        if kind != Kind::Dir {
            return namespace.unlink(parent, name);
        }
        for ListedName { name, kind } in self.list_dir(object.inode)? {
            let child = self.look_up(object.inode, &name)?;
            self.remove_tree(object.inode, &name, &child, kind)?;
        }
        namespace.rmdir(parent, name)
    }
}
