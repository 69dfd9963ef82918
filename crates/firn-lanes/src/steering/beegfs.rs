//! BeeGFS: an ioctl of the directory that makes the file on a wanted target.
//!
//! The structures and numbers are those of `beegfs_ioctl.h` of BeeGFS 7 and 8. How many targets a new file gets is its
//! directory's affair: `beegfs entry set --num-targets=1 DIR`, or `beegfs-ctl --setpattern --numtargets=1 DIR`.

use std::ffi::{CString, OsString, c_char, c_int};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;

use firn_backing::dir::steering::NewFile;
use firn_backing::{Errno, Result};
use rustix::ioctl::{Opcode, opcode};

use super::{
    Created, Driver, Location, Refusal, create_plain, not_on, open_made, open_to_ask, parse_numbers,
};

const ENTRY_ID_BYTES: usize = 27;
const ALIAS_BYTES: usize = 256;
/// In `EntryInfo::feature_flags`: the directory's metadata is mirrored.
const IS_BUDDY_MIRRORED: c_int = 2;
const TYPE_FILE: c_int = libc::DT_REG as c_int;

/// `struct BeegfsIoctl_GetEntryInfo_Arg`.
#[repr(C)]
struct EntryInfo {
    owner_id: u32,
    parent_entry_id: [u8; ENTRY_ID_BYTES],
    entry_id: [u8; ENTRY_ID_BYTES],
    entry_type: c_int,
    feature_flags: c_int,
}

/// `struct BeegfsIoctl_MkFileV3_Arg`.
#[repr(C)]
struct MakeFile {
    owner_node_id: u32,
    parent_parent_entry_id: *const c_char,
    parent_parent_entry_id_len: c_int,
    parent_entry_id: *const c_char,
    parent_entry_id_len: c_int,
    parent_is_buddy_mirrored: c_int,
    parent_name: *const c_char,
    parent_name_len: c_int,
    entry_name: *const c_char,
    entry_name_len: c_int,
    file_type: c_int,
    symlink_to: *const c_char,
    symlink_to_len: c_int,
    mode: c_int,
    uid: u32,
    gid: u32,
    num_targets: c_int,
    preferred_targets: *const u16,
    preferred_targets_len: c_int,
    storage_pool_id: u16,
}

/// `struct BeegfsIoctl_GetStripeInfo_Arg`.
#[repr(C)]
#[derive(Default)]
struct StripeInfo {
    pattern_type: u32,
    chunk_size: u32,
    num_targets: u16,
}

/// `struct BeegfsIoctl_GetStripeTargetV2_Arg`.
#[repr(C)]
struct StripeTarget {
    target_index: u32,
    target_or_group: u32,
    others: [u32; 4],
    aliases: [[u8; ALIAS_BYTES]; 2],
}

const GROUP: u8 = b'f';
const GET_STRIPE_INFO: Opcode = opcode::read::<StripeInfo>(GROUP, 25);
const GET_STRIPE_TARGET: Opcode = opcode::read::<StripeTarget>(GROUP, 26);
const MAKE_FILE: Opcode = opcode::write::<MakeFile>(GROUP, 29);
const GET_ENTRY_INFO: Opcode = opcode::read::<EntryInfo>(GROUP, 31);

/// Lanes are storage targets.
#[derive(Debug)]
pub struct Beegfs {
    targets: Vec<u16>,
}

impl Beegfs {
    /// For storage targets with these numbers, in decimal.
    pub fn new(servers: &[OsString]) -> std::result::Result<Self, String> {
        let meaning = "the number of a storage target, as `beegfs target list` shows it";
        let targets: Vec<u16> = parse_numbers(servers, meaning)?;
        if targets.contains(&0) {
            return Err(format!("`0` is not {meaning}"));
        }
        Ok(Self { targets })
    }
}

impl Driver for Beegfs {
    fn check(&self, dir: BorrowedFd<'_>) -> std::result::Result<(), String> {
        let asked = open_to_ask(dir).and_then(|dir| get_entry_info(dir.as_fd()));
        asked.map(drop).map_err(|error| not_on("BeeGFS", error))
    }

    fn create(&self, new: &NewFile<'_>, lane: usize) -> Result<Created> {
        let made = open_to_ask(new.parent).and_then(|parent| {
            let info = get_entry_info(parent.as_fd())?;
            make_file(parent.as_fd(), &info, new, self.targets[lane])
        });
        match made {
            Ok(()) => {
                let (file, _) = open_made(new)?;
                let wish = check_stripes(file.as_fd());
                Ok(Created { file, wish })
            }
            Err(error @ (Errno::EXIST | Errno::NOSPC | Errno::DQUOT | Errno::ROFS)) => Err(error),
            Err(error) => {
                let file = create_plain(new)?;
                Ok(Created::from_wish(file, Err(error)))
            }
        }
    }

    fn find_server(&self, file: BorrowedFd<'_>) -> Location {
        match get_stripe_info(file) {
            Ok(info) if info.num_targets == 1 => get_stripe_target(file)
                .map_or(Location::Unknown, |target| {
                    Location::Server(target.to_string())
                }),
            Ok(info) => Location::Striped(info.num_targets.into()),
            Err(_) => Location::Unknown,
        }
    }
}

fn check_stripes(file: BorrowedFd<'_>) -> std::result::Result<(), Refusal> {
    match get_stripe_info(file)?.num_targets {
        1 => Ok(()),
        targets => Err(Refusal(format!(
            "the directory gives new files {targets} targets: beegfs entry set --num-targets=1"
        ))),
    }
}

fn make_file(
    parent: BorrowedFd<'_>,
    info: &EntryInfo,
    new: &NewFile<'_>,
    target: u16,
) -> Result<()> {
    let name = CString::new(new.name.as_bytes()).map_err(|_| Errno::INVAL)?;
    let targets = [target, 0];
    let mut argument = MakeFile {
        owner_node_id: info.owner_id,
        parent_parent_entry_id: info.parent_entry_id.as_ptr().cast(),
        parent_parent_entry_id_len: len_with_end(&info.parent_entry_id),
        parent_entry_id: info.entry_id.as_ptr().cast(),
        parent_entry_id_len: len_with_end(&info.entry_id),
        parent_is_buddy_mirrored: c_int::from(info.feature_flags & IS_BUDDY_MIRRORED != 0),
        parent_name: c"".as_ptr(),
        parent_name_len: 1,
        entry_name: name.as_ptr(),
        entry_name_len: c_int::try_from(name.count_bytes() + 1).map_err(|_| Errno::NAMETOOLONG)?,
        file_type: TYPE_FILE,
        symlink_to: std::ptr::null(),
        symlink_to_len: 0,
        mode: (libc::S_IFREG | new.mode).cast_signed(),
        // Taken from root only, whose own file it becomes.
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        num_targets: 1,
        preferred_targets: targets.as_ptr(),
        preferred_targets_len: size_of_val(&targets) as c_int,
        storage_pool_id: 0,
    };
    // SAFETY: the number is that of this structure, whose pointers lead to strings and an array of the lengths beside
    // them, all alive until the call returns; the kernel only reads them.
    unsafe { call(parent, MAKE_FILE, &mut argument) }
}

fn get_entry_info(dir: BorrowedFd<'_>) -> Result<EntryInfo> {
    let mut info = EntryInfo {
        owner_id: 0,
        parent_entry_id: [0; ENTRY_ID_BYTES],
        entry_id: [0; ENTRY_ID_BYTES],
        entry_type: 0,
        feature_flags: 0,
    };
    // SAFETY: the number is that of this structure, which has no pointers and may hold any bytes.
    unsafe { call(dir, GET_ENTRY_INFO, &mut info) }?;
    let ids = [&info.parent_entry_id, &info.entry_id];
    if ids.iter().any(|id| !id.contains(&0)) {
        return Err(Errno::PROTO);
    }
    Ok(info)
}

fn get_stripe_info(file: BorrowedFd<'_>) -> Result<StripeInfo> {
    let mut info = StripeInfo::default();
    // SAFETY: the number is that of this structure, which has no pointers and may hold any bytes.
    unsafe { call(file, GET_STRIPE_INFO, &mut info) }?;
    Ok(info)
}

fn get_stripe_target(file: BorrowedFd<'_>) -> Result<u32> {
    let mut target = StripeTarget {
        target_index: 0,
        target_or_group: 0,
        others: [0; 4],
        aliases: [[0; ALIAS_BYTES]; 2],
    };
    // SAFETY: the number is that of this structure, which has no pointers and may hold any bytes.
    unsafe { call(file, GET_STRIPE_TARGET, &mut target) }?;
    Ok(target.target_or_group)
}

/// Bytes of a string up to its zero, and that.
fn len_with_end(string: &[u8]) -> c_int {
    let len = string.iter().position(|&byte| byte == 0);
    len.map_or(string.len(), |len| len + 1) as c_int
}

/// # Safety
///
/// `opcode` takes a `T`, and whatever `T` points to lives until the call returns.
unsafe fn call<T>(fd: BorrowedFd<'_>, opcode: Opcode, argument: &mut T) -> Result<()> {
    let argument: *mut T = argument;
    // SAFETY: the descriptor is open while it is borrowed; the caller answers for number and argument.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), opcode.into(), argument) };
    if result == 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    Err(Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_sizes_of_the_header() {
        // As a C compiler lays out beegfs_ioctl.h for 64-bit Linux.
        assert_eq!(size_of::<EntryInfo>(), 68);
        assert_eq!(size_of::<MakeFile>(), 120);
        assert_eq!(size_of::<StripeInfo>(), 12);
        assert_eq!(size_of::<StripeTarget>(), 536);
    }

    #[test]
    fn targets_are_numbers_from_one_on() {
        assert!(Beegfs::new(&["1".into(), "65535".into()]).is_ok());
        let error = Beegfs::new(&["0".into()]).unwrap_err();
        assert!(error.starts_with("`0` is not the number of a storage target"));
    }
}
