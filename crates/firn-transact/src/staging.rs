//! The files that transactions have in `.firn/`, Firn's own directory in the tree that a mount serves.
//!
//! `tx-N` is the directory of the transaction with the serial number N, `DIR` and `M` are numbers.
//! * An object is *staged* there before the commit moves it, or its bytes, into the visible tree.
//! * The *scope* is what a transaction covers, and the *top* is its uppermost directory.
//! * An *arena* is the memory of a mount with data that is not in the backing (that tree on disk) yet.
//!
//! ```text
//! .firn/committed          number of the last commit of each scope: a line each, with the path in hex
//! .firn/dropped            pending data that other arenas have to drop (`transaction::arenas`)
//! .firn/undo-N/            a committed transaction whose undo parts are kept (`history`)
//! .firn/tx-N/new/DIR/M     staged objects; all objects in one DIR inherit the same group and default ACL
//! .firn/tx-N/new/u/        with `history`: staged copies for the undo of the commit
//! .firn/tx-N/away/M        objects that have lost one name and not got the next, while a commit is applied
//! .firn/tx-N/saved/        in shadow mode: states of objects before their first change (`shadow::save`)
//! .firn/tx-N/kept/INO      in shadow mode: objects that were removed
//! .firn/tx-N/open          the transaction has not ended; has the path of its scope
//! .firn/tx-N/names         names that the top of the scope has or had (`transaction::top`)
//! .firn/tx-N/arena         id of the arena with which the transaction was begun
//! .firn/tx-N/record        the transaction is prepared; has the change log (`change_log`)
//! .firn/tx-N/commit        the transaction is decided; has the change log
//! .firn/tx-N/undo          a commit of the history that is being undone; has its change log
//! .firn/host-NAME/         the same files, for one of several hosts
//! .firn/vote-ID.../        the vote of those hosts on a commit (`vote`)
//! ```

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use base16ct::lower as hex;
use firn_backing::{Attr, Backing, Errno, Kind, NewKind, Result, SetTime};

use crate::change_log::{Attributes, LogError, StoredTime};
use crate::error::StoreError;
use crate::own::is_path;
pub(crate) use crate::own::{
    clear as remove_contents, clear_but as remove_contents_except, find, find_dir, list, make_dir,
    must_find_dir, new_name, own_caller as daemon_caller, read_file, replace_file,
    replace_file_unsynced, write_all, write_new_file,
};

pub use firn_hosts::own::TOP;
/// Name of Firn's own directory in the top of the backing: `.firn`.
pub(crate) use firn_hosts::own::TOP as FIRN_DIR;
// Names of the files and directories in `.firn/` and `tx-N/`; see the table at the head of this file.
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

/// Bits of `st_mode` other than the type: permissions, set-id and sticky bits.
const PERMISSION_BITS: u32 = 0o7777;

/// Reads the number of the last commit of each scope. A line that cannot be decoded is left out.
pub(crate) fn load_commit_numbers<B: Backing>(
    base: &B,
    transactions_dir: &B::Inode,
) -> Result<BTreeMap<Vec<u8>, u64>> {
    let text = read_file(base, transactions_dir, COMMITTED)?.unwrap_or_default();
    let parse_line = |line: &[u8]| {
        let (id, path) = std::str::from_utf8(line).ok()?.split_once(' ')?;
        Some((hex::decode_vec(path).ok()?, id.parse().ok()?))
    };
    Ok(text
        .split(|&byte| byte == b'\n')
        .filter_map(parse_line)
        .collect())
}

/// Stores the number of the last commit of each scope, durably.
pub(crate) fn store_commit_numbers<B: Backing>(
    base: &B,
    transactions_dir: &B::Inode,
    numbers: &BTreeMap<Vec<u8>, u64>,
) -> Result<()> {
    let mut text = String::new();
    for (path, id) in numbers {
        text += &format!("{id} {}\n", hex::encode_string(path));
    }
    replace_file(base, transactions_dir, COMMITTED, text.as_bytes())
}

/// Reads the path of the directory that a transaction covers (its scope) from the file `name` in the transaction's
/// directory `parent`. Returns `None` if there is no such file.
pub(crate) fn load_scope<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
) -> std::result::Result<Option<Vec<u8>>, StoreError> {
    let Some(scope) = read_file(base, parent, name)? else {
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

/// Makes an object other than a regular file, of the kind in `mode`: a directory, a symbolic link to `target`, or a
/// special file with the device number `rdev`. The caller sets its attributes; only the owner may use a directory
/// or special file until then.
pub(crate) fn make_non_file<B: Backing>(
    base: &B,
    dir: &B::Inode,
    name: &OsStr,
    mode: u32,
    rdev: u64,
    target: &[u8],
) -> Result<B::Inode> {
    let caller = daemon_caller();
    let (inode, _) = match mode & libc::S_IFMT {
        libc::S_IFDIR => base.mkdir(&caller, dir, name, 0o700)?,
        libc::S_IFLNK => base.symlink(&caller, dir, name, OsStr::from_bytes(target))?,
        special_kind => {
            let mode = special_kind | 0o600;
            base.make(&caller, dir, name, NewKind::Node { mode, rdev })?
        }
    };
    Ok(inode)
}

/// Gives `to` the attributes of `from`.
pub(crate) fn copy_attributes<B: Backing>(base: &B, from: &B::Inode, to: &B::Inode) -> Result<()> {
    set_attributes(base, to, &read_attributes(base, from, &base.attr(from)?)?)
}

/// Returns the attributes of an object as a change log keeps them. `attr` is the result of stat(2) for the object.
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
            _ => read_xattrs(base, inode)?,
        },
    })
}

/// Sets owner, extended attributes, mode and times of an object, as far as they differ.
pub(crate) fn set_attributes<B: Backing>(
    base: &B,
    inode: &B::Inode,
    wanted: &Attributes,
) -> Result<()> {
    let present = base.attr(inode)?;
    let changes_owner = (wanted.uid, wanted.gid) != (present.uid, present.gid);
    if changes_owner {
        base.set_owner(inode, Some(wanted.uid), Some(wanted.gid))?;
    }
    if present.kind != Kind::Symlink {
        let has_xattrs = set_xattrs(base, inode, &wanted.xattrs)?;
        // A new owner clears set-id bits, and a new ACL changes permission bits, so the mode is set last.
        let is_other_mode = (wanted.mode ^ present.mode) & PERMISSION_BITS != 0;
        if changes_owner || has_xattrs || is_other_mode {
            base.set_mode(inode, wanted.mode & PERMISSION_BITS)?;
        }
    }
    let set_to = |time: StoredTime| SetTime::At(time.into());
    base.set_times(inode, set_to(wanted.atime), set_to(wanted.mtime))
}

/// Returns the names of the extended attributes of an object; none if the file system has no extended attributes.
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

/// Returns whether `OPNOTSUPP` for this object is a failure, because the top of the backing has extended attributes. If
/// it were taken for an empty list, a commit would remove the attributes of the object.
fn must_have_xattrs<B: Backing>(base: &B, inode: &B::Inode) -> Result<bool> {
    let attr = base.attr(inode)?;
    let top = base.root();
    let is_plain = matches!(attr.kind, Kind::File | Kind::Dir) && attr.dev == base.attr(&top)?.dev;
    Ok(is_plain && base.list_xattr(&top).is_ok())
}

/// Returns whether any user can set this attribute. Errors of other attributes are ignored.
fn needs_no_privilege(name: &[u8]) -> bool {
    name.starts_with(b"user.") || name.starts_with(b"system.posix_acl_")
}

/// Returns names and values of the extended attributes of an object.
pub(crate) fn read_xattrs<B: Backing>(
    base: &B,
    inode: &B::Inode,
) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut xattrs = Vec::new();
    for name in xattr_names(base, inode)? {
        match base.get_xattr(inode, OsStr::from_bytes(&name)) {
            Ok(value) => xattrs.push((name, value)),
            Err(errno) if needs_no_privilege(&name) => return Err(errno),
            // Attributes that need a privilege are left out if they cannot be read.
            Err(_) => {}
        }
    }
    Ok(xattrs)
}

/// Sets the extended attributes of an object, and removes all others. Returns whether the object has or had any. Errors
/// count only for attributes that need no privilege.
pub(crate) fn set_xattrs<B: Backing>(
    base: &B,
    inode: &B::Inode,
    wanted: &[(Vec<u8>, Vec<u8>)],
) -> Result<bool> {
    let present_names = xattr_names(base, inode)?;
    for (name, value) in wanted {
        let set = base.set_xattr(inode, OsStr::from_bytes(name), value, 0);
        if needs_no_privilege(name) {
            set?;
        }
    }
    for name in &present_names {
        if wanted.iter().any(|(wanted_name, _)| wanted_name == name) {
            continue;
        }
        let removed = base.remove_xattr(inode, OsStr::from_bytes(name));
        if needs_no_privilege(name) {
            removed?;
        }
    }
    Ok(!wanted.is_empty() || !present_names.is_empty())
}
