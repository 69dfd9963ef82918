//! The driver for Lustre: creates new files on a chosen OST (object storage target). A *lane* is one OST.
//!
//! The driver sets the extended attribute `lustre.lov`, which is the file's layout, before the objects of the file are
//! allocated. `llapi_layout_file_open` does the same (lustreapi(7)). The file is opened with `O_LOV_DELAY_CREATE`, so
//! that Lustre chooses no OST yet. Then the file gets a layout of one stripe that begins at the chosen OST.

use std::ffi::{CStr, OsString};
use std::ops::Range;
use std::os::fd::BorrowedFd;

use firn_backing::Result;
use firn_backing::dir::steering::NewFile;
use rustix::fs::{OFlags, XattrFlags, fgetxattr, fsetxattr};

use super::{Created, Driver, Location, check_magic, parse_numbers};

/// `f_type` of Lustre in statfs(2) (LL_SUPER_MAGIC).
const MAGIC: u64 = 0x0BD0_0BD0;
/// Extended attribute with the layout of a file.
const LAYOUT: &CStr = c"lustre.lov";
/// Magic number of a layout without the name of a pool (LOV_USER_MAGIC_V1).
const MAGIC_V1: u32 = 0x0BD1_0BD0;
/// Magic number of a layout with the name of a pool (LOV_USER_MAGIC_V3).
const MAGIC_V3: u32 = 0x0BD3_0BD0;
/// Pattern of a layout of plain stripes (LOV_PATTERN_RAID0).
const PATTERN_RAID0: u32 = 1;
/// Bytes of a layout with the number of stripes.
const STRIPE_COUNT_FIELD: Range<usize> = 28..30;
/// Bytes of a layout with the index of the OST of the first stripe.
const FIRST_OST_FIELD: Range<usize> = 30..32;
/// Size of `struct lov_user_md_v1` without objects, in bytes.
const HEADER_BYTES: usize = 32;
/// Size of the pool name in bytes; it follows the header in `struct lov_user_md_v3`.
const POOL_BYTES: usize = 16;
/// Size of `struct lov_user_ost_data_v1` in bytes: the id of an object, a generation, and the index of its OST.
const OBJECT_BYTES: usize = 24;

/// Returns `O_LOV_DELAY_CREATE`. Lustre encodes it as these two flags, which have no effect on regular files of other
/// file systems.
fn delay_create() -> OFlags {
    OFlags::NOCTTY | OFlags::from_bits_retain(libc::O_ASYNC as u32)
}

/// Placement on Lustre: each lane is an OST.
#[derive(Debug)]
pub struct Lustre {
    /// The index of each lane's OST.
    osts: Vec<u16>,
}

impl Lustre {
    /// Creates the placement for OSTs with these decimal indexes.
    pub fn new(servers: &[OsString]) -> std::result::Result<Self, String> {
        let osts = parse_numbers(servers, "the index of an OST, as `lfs osts` shows it")?;
        Ok(Self { osts })
    }
}

impl Driver for Lustre {
    fn check(&self, dir: BorrowedFd<'_>) -> std::result::Result<(), String> {
        check_magic(dir, MAGIC, "Lustre")
    }

    fn create(&self, new: &NewFile<'_>, lane: usize) -> Result<Created> {
        let file = new.open(delay_create())?;
        let layout = encode_layout(self.osts[lane]);
        let acceptance = fsetxattr(&file, LAYOUT, &layout, XattrFlags::empty());
        Ok(Created::from_acceptance(file, acceptance))
    }

    fn find_server(&self, file: BorrowedFd<'_>) -> Location {
        let mut buf = [0; HEADER_BYTES + POOL_BYTES + OBJECT_BYTES];
        match fgetxattr(file, LAYOUT, &mut buf) {
            Ok(len) => decode_layout(&buf[..len]),
            // The layout of a file with many stripes does not fit into `buf`.
            Err(_) => Location::Unknown,
        }
    }
}

/// Encodes a layout of one stripe of the default size on this OST.
fn encode_layout(ost: u16) -> [u8; HEADER_BYTES] {
    let mut layout = [0; HEADER_BYTES];
    layout[0..4].copy_from_slice(&MAGIC_V1.to_ne_bytes());
    layout[4..8].copy_from_slice(&PATTERN_RAID0.to_ne_bytes());
    // Bytes 8..24 are the object's id. Bytes 24..28 are the size of a stripe: 0 for the default of the file system.
    let stripe_count = 1u16;
    layout[STRIPE_COUNT_FIELD].copy_from_slice(&stripe_count.to_ne_bytes());
    layout[FIRST_OST_FIELD].copy_from_slice(&ost.to_ne_bytes());
    layout
}

/// Returns the server of a file from its layout, the value of the attribute `lustre.lov`. A server of Lustre is an OST,
/// which has an index. The location is unknown if the layout is of another version or too short.
fn decode_layout(layout: &[u8]) -> Location {
    let objects_offset = match read_u32(layout, 0) {
        Some(MAGIC_V1) => HEADER_BYTES,
        Some(MAGIC_V3) => HEADER_BYTES + POOL_BYTES,
        _ => return Location::Unknown,
    };
    let Some(stripe_count) = layout.get(STRIPE_COUNT_FIELD) else {
        return Location::Unknown;
    };
    let stripe_count = u16::from_ne_bytes([stripe_count[0], stripe_count[1]]);
    if stripe_count != 1 {
        return Location::Striped(stripe_count.into());
    }
    // The index of the OST is the last field of the object, of 4 bytes.
    match read_u32(layout, objects_offset + OBJECT_BYTES - 4) {
        Some(ost) => Location::Server(ost.to_string()),
        None => Location::Unknown,
    }
}

/// Reads the number at `offset` of a layout. Returns `None` if the layout ends before.
fn read_u32(layout: &[u8], offset: usize) -> Option<u32> {
    let bytes = layout.get(offset..offset + 4)?;
    Some(u32::from_ne_bytes(bytes.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_that_of_the_header() {
        // Written out by hand from `struct lov_user_md_v1` of lustre_user.h, little-endian: one stripe, on OST 3.
        let expected = [
            0xd0, 0x0b, 0xd1, 0x0b, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 1, 0, 3, 0,
        ];
        if cfg!(target_endian = "little") {
            assert_eq!(encode_layout(3), expected);
        }
    }

    #[test]
    fn the_place_of_a_file_is_read_from_its_layout() {
        let mut layout = encode_layout(0).to_vec();
        layout.extend([0; OBJECT_BYTES]);
        let index = layout.len() - 4;
        layout[index..].copy_from_slice(&7u32.to_ne_bytes());
        assert_eq!(decode_layout(&layout), Location::Server("7".into()));

        let mut in_pool = layout.clone();
        in_pool[0..4].copy_from_slice(&MAGIC_V3.to_ne_bytes());
        in_pool.splice(HEADER_BYTES..HEADER_BYTES, [0; POOL_BYTES]);
        assert_eq!(decode_layout(&in_pool), Location::Server("7".into()));

        layout[28..30].copy_from_slice(&4u16.to_ne_bytes());
        assert_eq!(decode_layout(&layout), Location::Striped(4));
    }

    #[test]
    fn a_layout_that_is_cut_off_says_nothing() {
        let layout = encode_layout(1);
        for len in 0..HEADER_BYTES {
            assert_eq!(decode_layout(&layout[..len]), Location::Unknown, "{len}");
        }
        assert_eq!(decode_layout(&layout), Location::Unknown);
    }

    #[test]
    fn a_lane_that_is_no_number_is_refused() {
        let error = Lustre::new(&["0".into(), "ost1".into()]).unwrap_err();
        assert!(error.starts_with("`ost1` is not the index of an OST"));
        assert!(Lustre::new(&["65536".into()]).is_err());
    }
}
