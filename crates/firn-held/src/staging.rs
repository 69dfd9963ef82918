//! `.firn/` in the backing: where transactions keep what is not committed.
//!
//! ```text
//! .firn/committed          number of the last commit of each scope: a line each, with the path in hex
//! .firn/undo-N/            what undoes commit tx-N: `new`, `away` and `record` as below
//! .firn/tx-N/new/DIR/M     staged objects; DIR says what objects made in it inherit
//! .firn/tx-N/away/M        objects on their way from one name to another, while a commit is carried out
//! .firn/tx-N/saved/        in shadow mode: what objects were before they changed (`shadow::saved`)
//! .firn/tx-N/kept/INO      in shadow mode: objects that were removed
//! .firn/tx-N/open          it is not over; the path of its scope
//! .firn/tx-N/record        prepared: the redo record
//! .firn/tx-N/commit        the same, decided
//! .firn/node-NAME/         all of this, of one of several nodes
//! .firn/meet-ID.../        where those nodes decide about a commit: `meeting`
//! ```

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::IoSlice;
use std::os::unix::ffi::OsStrExt;

use firn_backing::{Access, Backing, Caller, Errno, Kind, RenameFlags, Result};

/// The directory at the top of the backing.
pub(crate) const TOP: &str = ".firn";
/// Before the name of a node, of several.
pub(crate) const NODE: &str = "node-";
pub(crate) const OPEN: &str = "open";
pub(crate) const RECORD: &str = "record";
pub(crate) const COMMIT: &str = "commit";
pub(crate) const COMMITTED: &str = "committed";
pub(crate) const NEW: &str = "new";
pub(crate) const AWAY: &str = "away";

/// This process, for objects that are its own.
pub(crate) fn own() -> Caller {
    // SAFETY: these calls cannot fail and touch no memory.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    Caller { uid, gid, pid: 0 }
}

/// The directory `name` in `parent`, made if it is not there. It hands nothing of the group and the ACL of
/// `parent` on to what is made in it.
pub(crate) fn dir<B: Backing>(base: &B, parent: &B::Node, name: &str) -> Result<B::Node> {
    let node = match base.mkdir(&own(), parent, OsStr::new(name), 0o700) {
        Ok((node, _)) => node,
        Err(Errno::EXIST) => return Ok(base.lookup(parent, OsStr::new(name))?.0),
        Err(errno) => return Err(errno),
    };
    if base.has_default_acl(&node) {
        for acl in ["system.posix_acl_default", "system.posix_acl_access"] {
            match base.remove_xattr(&node, OsStr::new(acl)) {
                Ok(()) | Err(Errno::NODATA) => {}
                Err(errno) => return Err(errno),
            }
        }
    }
    if base.attr(&node)?.mode & 0o7777 != 0o700 {
        base.set_mode(&node, 0o700)?;
    }
    Ok(node)
}

/// `Ok(None)` where there is nothing of that name.
pub(crate) fn find<B: Backing>(
    base: &B,
    parent: &B::Node,
    name: &OsStr,
) -> Result<Option<(B::Node, firn_backing::Attr)>> {
    match base.lookup(parent, name) {
        Ok(found) => Ok(Some(found)),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// The name that something has before it is whole.
pub(crate) fn new_name(name: &str) -> String {
    format!("{name}.new")
}

/// Makes a file with these bytes, durable but for its name, which is not yet `name` ([`new_name`]).
pub(crate) fn write<B: Backing>(base: &B, parent: &B::Node, name: &str, bytes: &[u8]) -> Result<()> {
    let new = new_name(name);
    let new = OsStr::new(&new);
    if find(base, parent, new)?.is_some() {
        base.unlink(parent, new)?;
    }
    let (_, file, _) = base.create(&own(), parent, new, 0o600)?;
    write_all(base, &file, bytes, 0)?;
    base.sync(&file, false)
}

/// pwrite(2), until all is written.
pub(crate) fn write_all<B: Backing>(base: &B, file: &B::File, bytes: &[u8], offset: u64) -> Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        done += match base.write_at(file, &[IoSlice::new(&bytes[done..])], offset + done as u64)? {
            0 => return Err(Errno::IO),
            count => count,
        };
    }
    Ok(())
}

/// Puts a file with these bytes in the place of `name`, durably.
pub(crate) fn store<B: Backing>(base: &B, parent: &B::Node, name: &str, bytes: &[u8]) -> Result<()> {
    write(base, parent, name, bytes)?;
    let new = new_name(name);
    base.rename(parent, OsStr::new(&new), parent, OsStr::new(name), RenameFlags::empty())?;
    base.sync_dir(parent)
}

/// The number of the last commit of each scope.
pub(crate) fn load_numbers<B: Backing>(base: &B, firn: &B::Node) -> Result<BTreeMap<Vec<u8>, u64>> {
    let text = load(base, firn, COMMITTED)?.unwrap_or_default();
    let line = |line: &[u8]| {
        let (id, hex) = std::str::from_utf8(line).ok()?.split_once(' ')?;
        let byte = |at: usize| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok();
        let path = (0..hex.len()).step_by(2).map(byte).collect::<Option<Vec<u8>>>()?;
        Some((path, id.parse().ok()?))
    };
    Ok(text.split(|&byte| byte == b'\n').filter_map(line).collect())
}

pub(crate) fn store_numbers<B: Backing>(
    base: &B,
    firn: &B::Node,
    numbers: &BTreeMap<Vec<u8>, u64>,
) -> Result<()> {
    let mut text = String::new();
    for (path, id) in numbers {
        let hex: String = path.iter().map(|byte| format!("{byte:02x}")).collect();
        text += &format!("{id} {hex}\n");
    }
    store(base, firn, COMMITTED, text.as_bytes())
}

/// The bytes of a file; `None` where there is none.
pub(crate) fn load<B: Backing>(base: &B, parent: &B::Node, name: &str) -> Result<Option<Vec<u8>>> {
    let Some((node, attr)) = find(base, parent, OsStr::new(name))? else { return Ok(None) };
    let mut bytes = vec![0; attr.size as usize];
    let count = base.read_at(&base.open(&node, Access::Read)?, &mut bytes, 0)?;
    bytes.truncate(count);
    Ok(Some(bytes))
}

/// A name, the inode number and the kind of what it leads to.
pub(crate) type Entry = (Vec<u8>, u64, Option<Kind>);

/// Names and kinds in a directory, but `.` and `..`.
pub(crate) fn list<B: Backing>(base: &B, dir: &B::Node) -> Result<Vec<Entry>> {
    let mut names = Vec::new();
    base.read_dir(&base.open_dir(dir)?, 0, &mut |entry| {
        if entry.name != "." && entry.name != ".." {
            names.push((entry.name.as_bytes().to_vec(), entry.ino, entry.kind));
        }
        true
    })?;
    Ok(names)
}

/// Removes all that is below a directory.
pub(crate) fn clear<B: Backing>(base: &B, dir: &B::Node) -> Result<()> {
    for (name, _, kind) in list(base, dir)? {
        let name = OsStr::from_bytes(&name);
        let kind = match kind {
            Some(kind) => kind,
            None => base.lookup(dir, name)?.1.kind,
        };
        if kind == Kind::Dir {
            clear(base, &base.lookup(dir, name)?.0)?;
            base.rmdir(dir, name)?;
        } else {
            base.unlink(dir, name)?;
        }
    }
    Ok(())
}

/// Makes `to` have the attributes of `from`: owner, extended attributes, mode, times.
pub(crate) fn copy_attributes<B: Backing>(base: &B, from: &B::Node, to: &B::Node) -> Result<()> {
    let (wanted, has) = (base.attr(from)?, base.attr(to)?);
    let mut sets_mode = (wanted.mode ^ has.mode) & 0o7777 != 0;
    if (wanted.uid, wanted.gid) != (has.uid, has.gid) {
        base.set_owner(to, Some(wanted.uid), Some(wanted.gid))?;
        sets_mode = true;
    }
    if has.kind != Kind::Symlink {
        // An owner's change and an ACL's change the mode, too.
        if copy_xattrs(base, from, to)? || sets_mode {
            base.set_mode(to, wanted.mode & 0o7777)?;
        }
    }
    let at = firn_backing::SetTime::At;
    base.set_times(to, at(wanted.atime), at(wanted.mtime))
}

/// Whether there was anything to copy or to remove.
fn copy_xattrs<B: Backing>(base: &B, from: &B::Node, to: &B::Node) -> Result<bool> {
    set_xattrs(base, to, &xattrs(base, from)?)
}

fn xattr_names<B: Backing>(base: &B, node: &B::Node) -> Result<Vec<Vec<u8>>> {
    let names = match base.list_xattr(node) {
        Ok(names) => names,
        Err(Errno::OPNOTSUPP | Errno::PERM) => Vec::new(),
        Err(errno) => return Err(errno),
    };
    Ok(names.split(|&byte| byte == 0).filter(|name| !name.is_empty()).map(<[u8]>::to_vec).collect())
}

/// Those that only a privileged process sets are taken along where that is allowed.
fn is_everybodys(name: &[u8]) -> bool {
    name.starts_with(b"user.") || name.starts_with(b"system.posix_acl_")
}

/// Names and values of the extended attributes of an object.
pub(crate) fn xattrs<B: Backing>(base: &B, node: &B::Node) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut found = Vec::new();
    for name in xattr_names(base, node)? {
        match base.get_xattr(node, OsStr::from_bytes(&name)) {
            Ok(value) => found.push((name, value)),
            Err(errno) if is_everybodys(&name) => return Err(errno),
            Err(_) => {}
        }
    }
    Ok(found)
}

/// Makes an object have these extended attributes and no others. Whether there were or are any.
pub(crate) fn set_xattrs<B: Backing>(
    base: &B,
    node: &B::Node,
    wanted: &[(Vec<u8>, Vec<u8>)],
) -> Result<bool> {
    let has = xattr_names(base, node)?;
    for (name, value) in wanted {
        let result = base.set_xattr(node, OsStr::from_bytes(name), value, 0);
        if is_everybodys(name) {
            result?;
        }
    }
    for name in &has {
        if !wanted.iter().any(|(kept, _)| kept == name) {
            let result = base.remove_xattr(node, OsStr::from_bytes(name));
            if is_everybodys(name) {
                result?;
            }
        }
    }
    Ok(!wanted.is_empty() || !has.is_empty())
}
