//! This crate is firnd, the process that serves one mount of a backing directory, from the first checks to the end. It
//! also has the commands that work on a backing without a mount.
//!
//! [`mount()`] starts a firnd and returns when its mount is usable; [`firnd_main`] is the main function of that
//! process. The arena is shared memory with the bytes that are not in the backing yet: [`recover()`] copies them there
//! without a mount, and [`check()`] reads them without changing anything. firn-engine decides what happens to files,
//! and firn-config has the options. This crate connects them.

mod answers;
mod arena_opening;
mod assembly;
mod attach;
mod backup;
mod check;
mod checkpoint_log;
mod chunks;
mod commit_applier;
mod commit_rules;
mod control;
mod data_socket;
mod discard;
mod end;
mod end_timeout;
mod error;
mod event;
mod file_locks;
mod firnd;
mod frontend;
mod gate;
mod host_lease;
mod host_name;
mod keeper;
mod lane_rule;
mod last_drain;
mod lock;
mod log;
mod logs;
mod losses;
mod lost;
mod lower_store;
mod mount;
mod mount_request;
mod mount_users;
mod mountinfo;
mod orphans;
mod owners;
mod part;
mod participants;
mod partner;
mod parts;
mod peers;
mod placement;
mod preflight;
mod prepared;
mod process;
mod pulls;
mod rates;
mod record_file;
mod recover;
mod replies;
mod runtime_files;
mod single_job;
mod spawn;
mod spill;
mod status;
mod steering;
mod store;
mod store_opening;
mod takeover;
mod timeline;
mod token_source;
mod transactions;
mod undone_scopes;
mod unmounted;

pub use backup::{BackupReport, FromBackup, recover_from_backup};
pub use check::{CheckReport, Damage, LogFinding, LogsReport, check, check_logs};
pub use discard::{DiscardReport, discard, find_arena, list_arenas};
pub use error::{
    AttachError, CheckError, FlattenError, LaneFault, MapFault, MountError, RecoverError,
};
pub use keeper::{KEEPER_NAME, keeper_main};
pub use logs::{flatten, flatten_with_loss};
pub use lost::{LostPolicy, LostReport};
pub use mount::{firnd_main, mount, mount_with_notices};
pub use mount_request::MountRequest;
pub use orphans::{find_orphans, forget_lane};
pub use preflight::{check_backing, write_refusal};
pub use record_file::{FoundRecord, read_in_backing as read_records};
pub use recover::{HostReport, RecoverReport, RecoverRequest, recover, recover_host};
pub use unmounted::FoundOrphan;
