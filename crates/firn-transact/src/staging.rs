//! `.firn/` in the backing: where transactions keep what is not committed.
//!
//! ```text
//! .firn/committed          number of the last commit of each scope: a line each, with the path in hex
//! .firn/dropped            what arenas that are not at hand have to drop (`transaction::arenas`)
//! .firn/undo-N/            what was tx-N, committed and kept to be undone (`history`)
//! .firn/tx-N/new/DIR/M     staged objects; DIR says what objects made in it inherit
//! .firn/tx-N/new/u/        with `history`: what undoes the commit
//! .firn/tx-N/away/M        objects on their way from one name to another, while a commit is applied
//! .firn/tx-N/saved/        in shadow mode: what objects were before they changed (`shadow::save`)
//! .firn/tx-N/kept/INO      in shadow mode: objects that were removed
//! .firn/tx-N/open          it is not over; the path of its scope
//! .firn/tx-N/names         names that the top of its scope has or had in it (`transaction::top`)
//! .firn/tx-N/arena         the arena of the mount that began it
//! .firn/tx-N/record        prepared: the change log (`change_log`)
//! .firn/tx-N/commit        the same, decided
//! .firn/tx-N/undo          the same, committed before and now being undone
//! .firn/host-NAME/         all of this, of one of several hosts
//! .firn/vote-ID.../        where those hosts vote on a commit: `vote`
//! ```

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use base16ct::lower;
use firn_backing::{Attr, Backing, Errno, Kind, NewKind, Result};

use crate::change_log::{Attributes, LogError, StoredTime};
use crate::error::StoreError;
use crate::own::is_path;
pub(crate) use crate::own::{
    clear, clear_but, dir, find, find_dir, list, load, must_find_dir, new_name, own_caller as own,
    put, store, write, write_all,
};

pub use firn_hosts::own::TOP;
pub(crate) const OPEN: &str = "open";
pub(crate) const NAMES: &str = "names";
pub(crate) const KEY: &str = "key";
pub(crate) const ARENA: &str = "arena";
pub(crate) const BACKUP: &str = "backup";
pub(crate) const DROPPED: &str = "dropped";
pub(crate) const RECORD: &str = "record";
pub(crate) const COMMIT: &str = "commit";
pub(crate) const UNDO: &str = "undo";
pub(crate) const COMMITTED: &str = "committed";
pub(crate) const NEW: &str = "new";
pub(crate) const AWAY: &str = "away";

/// The number of the last commit of each scope.
pub(crate) fn load_numbers<B: Backing>(
    base: &B,
    firn: &B::Inode,
) -> Result<BTreeMap<Vec<u8>, u64>> {
    let text = load(base, firn, COMMITTED)?.unwrap_or_default();
    let line = |line: &[u8]| {
        let (id, hex) = std::str::from_utf8(line).ok()?.split_once(' ')?;
        Some((lower::decode_vec(hex).ok()?, id.parse().ok()?))
    };
    Ok(text.split(|&byte| byte == b'\n').filter_map(line).collect())
}

pub(crate) fn store_numbers<B: Backing>(
    base: &B,
    firn: &B::Inode,
    numbers: &BTreeMap<Vec<u8>, u64>,
) -> Result<()> {
    let mut text = String::new();
    for (path, id) in numbers {
        text += &format!("{id} {}\n", lower::encode_string(path));
    }
    store(base, firn, COMMITTED, text.as_bytes())
}

/// The scope of a transaction, as a file of it tells; `None` where there is no such file.
pub(crate) fn load_scope<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
) -> std::result::Result<Option<Vec<u8>>, StoreError> {
    let Some(scope) = load(base, parent, name)? else {
        return Ok(None);
    };
    if is_path(&scope) {
        return Ok(Some(scope));
    }
    Err(StoreError::Record {
        path: name.into(),
        source: LogError::Damaged,
    })
}

/// Makes an object that is no file, of the kind in `mode`: a directory, a link to `target`, or what has the number
/// `rdev`. Attributes come later.
pub(crate) fn make_special<B: Backing>(
    base: &B,
    dir: &B::Inode,
    name: &OsStr,
    mode: u32,
    rdev: u64,
    target: &[u8],
) -> Result<B::Inode> {
    let made = match mode & libc::S_IFMT {
        libc::S_IFDIR => base.mkdir(&own(), dir, name, 0o700)?,
        libc::S_IFLNK => base.symlink(&own(), dir, name, OsStr::from_bytes(target))?,
        kind => {
            let mode = kind | 0o600;
            base.make(&own(), dir, name, NewKind::Node { mode, rdev })?
        }
    };
    Ok(made.0)
}

/// Makes `to` have the attributes of `from`.
pub(crate) fn copy_attributes<B: Backing>(base: &B, from: &B::Inode, to: &B::Inode) -> Result<()> {
    set_attributes(base, to, &read_attributes(base, from, &base.attr(from)?)?)
}

/// The attributes of an object as a log keeps them; `attr` is what stat(2) says.
pub(crate) fn read_attributes<B: Backing>(
    base: &B,
    inode: &B::Inode,
    attr: &Attr,
) -> Result<Attributes> {
    Ok(Attributes {
        mode: attr.mode,
        uid: attr.uid,
        gid: attr.gid,
        atime: attr.atime.into(),
        mtime: attr.mtime.into(),
        xattrs: match attr.kind {
            Kind::Symlink => Vec::new(),
            _ => xattrs(base, inode)?,
        },
    })
}

/// Makes an object have these attributes: owner, extended attributes, mode, times.
pub(crate) fn set_attributes<B: Backing>(
    base: &B,
    inode: &B::Inode,
    wanted: &Attributes,
) -> Result<()> {
    let has = base.attr(inode)?;
    let mut sets_mode = (wanted.mode ^ has.mode) & 0o7777 != 0;
    if (wanted.uid, wanted.gid) != (has.uid, has.gid) {
        base.set_owner(inode, Some(wanted.uid), Some(wanted.gid))?;
        sets_mode = true;
    }
    if has.kind != Kind::Symlink {
        // An owner's change and an ACL's change the mode, too.
        sets_mode |= set_xattrs(base, inode, &wanted.xattrs)?;
        if sets_mode {
            base.set_mode(inode, wanted.mode & 0o7777)?;
        }
    }
    let at = |time: StoredTime| firn_backing::SetTime::At(time.into());
    base.set_times(inode, at(wanted.atime), at(wanted.mtime))
}

fn xattr_names<B: Backing>(base: &B, inode: &B::Inode) -> Result<Vec<Vec<u8>>> {
    let names = match base.list_xattr(inode) {
        Ok(names) => names,
        Err(Errno::OPNOTSUPP) if !must_have_xattrs(base, inode)? => Vec::new(),
        Err(Errno::PERM) => Vec::new(),
        Err(errno) => return Err(errno),
    };
    Ok(names
        .split(|&byte| byte == 0)
        .filter(|name| !name.is_empty())
        .map(<[u8]>::to_vec)
        .collect())
}

/// Whether it is a failure that there is no list: taken for an empty one, a commit would remove what is there.
fn must_have_xattrs<B: Backing>(base: &B, inode: &B::Inode) -> Result<bool> {
    let attr = base.attr(inode)?;
    let top = base.root();
    let is_plain = matches!(attr.kind, Kind::File | Kind::Dir) && attr.dev == base.attr(&top)?.dev;
    Ok(is_plain && base.list_xattr(&top).is_ok())
}

/// Whether any user can set this attribute. Others are copied where that is allowed.
fn needs_no_privilege(name: &[u8]) -> bool {
    name.starts_with(b"user.") || name.starts_with(b"system.posix_acl_")
}

/// Names and values of the extended attributes of an object.
pub(crate) fn xattrs<B: Backing>(base: &B, inode: &B::Inode) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut found = Vec::new();
    for name in xattr_names(base, inode)? {
        match base.get_xattr(inode, OsStr::from_bytes(&name)) {
            Ok(value) => found.push((name, value)),
            Err(errno) if needs_no_privilege(&name) => return Err(errno),
            Err(_) => {}
        }
    }
    Ok(found)
}

/// Makes an object have exactly these extended attributes. Returns whether there were or are any.
pub(crate) fn set_xattrs<B: Backing>(
    base: &B,
    inode: &B::Inode,
    wanted: &[(Vec<u8>, Vec<u8>)],
) -> Result<bool> {
    let has = xattr_names(base, inode)?;
    for (name, value) in wanted {
        let result = base.set_xattr(inode, OsStr::from_bytes(name), value, 0);
        if needs_no_privilege(name) {
            result?;
        }
    }
    for name in &has {
        if !wanted.iter().any(|(kept, _)| kept == name) {
            let result = base.remove_xattr(inode, OsStr::from_bytes(name));
            if needs_no_privilege(name) {
                result?;
            }
        }
    }
    Ok(!wanted.is_empty() || !has.is_empty())
}
