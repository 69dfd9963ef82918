//! A service manager (systemd) in the place of the keeper: it holds the descriptors of a mount, and starts another
//! firnd (the process that serves the mount) when one dies.
//!
//! It is used for a mount in the foreground if the unit has `FileDescriptorStoreMax=`. Protocols: sd_notify(3) with
//! `FDSTORE=1` gives it a descriptor under a name; sd_listen_fds(3) passes all of them to the next firnd.
//!
//! Relies on: systemd 254 or later, which sets `FDSTORE` in the environment if it stores descriptors.

use std::ffi::OsString;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::time::Duration;

use rustix::fd::BorrowedFd;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, sendmsg, socket_with,
};

use super::message::{KeptDescriptor, Label, Tag};

/// Number of the first passed descriptor (`SD_LISTEN_FDS_START`).
const FIRST_DESCRIPTOR: RawFd = 3;
/// Prefix of the names of stored descriptors.
const NAME_PREFIX: &str = "firn-";

/// The connection to the service manager.
#[derive(Debug)]
pub(super) struct ServiceManager(OwnedFd);

impl ServiceManager {
    /// Connects to the service manager that started this process; `None` if it stores no descriptors. A message to a
    /// service manager that does not read waits for at most `timeout`.
    pub(super) fn find(timeout: Duration) -> io::Result<Option<Self>> {
        let stores = std::env::var_os("FDSTORE").is_some_and(|limit| limit != "0");
        let Some(address) = std::env::var_os("NOTIFY_SOCKET").filter(|_| stores) else {
            return Ok(None);
        };
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        connect(&socket, &socket_address(&address)?)?;
        set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
        Ok(Some(Self(socket)))
    }

    /// Stores a descriptor, in place of an earlier one with the same label.
    pub(super) fn store(&self, label: Label, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.remove(label)?;
        // Without FDPOLL=0 the service manager drops a descriptor that has an error or a hang-up.
        let state = format!("FDSTORE=1\nFDPOLL=0\nFDNAME={}", name_of_label(label));
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        let descriptors = [descriptor];
        rights.push(SendAncillaryMessage::ScmRights(&descriptors));
        self.send(&state, &mut rights)
    }

    /// Makes the service manager close a descriptor.
    pub(super) fn remove(&self, label: Label) -> io::Result<()> {
        let state = format!("FDSTOREREMOVE=1\nFDNAME={}", name_of_label(label));
        self.send(&state, &mut SendAncillaryBuffer::default())
    }

    /// Reports to the service manager that programs see the mount.
    pub(super) fn notify_serving(&self) -> io::Result<()> {
        self.send("READY=1", &mut SendAncillaryBuffer::default())
    }

    /// Reports to the service manager that the mount ends.
    pub(super) fn notify_ending(&self) -> io::Result<()> {
        self.send("STOPPING=1", &mut SendAncillaryBuffer::default())
    }

    fn send(&self, state: &str, rights: &mut SendAncillaryBuffer<'_, '_, '_>) -> io::Result<()> {
        let parts = [IoSlice::new(state.as_bytes())];
        rustix::io::retry_on_intr(|| sendmsg(&self.0, &parts, rights, SendFlags::NOSIGNAL))?;
        Ok(())
    }
}

/// Returns the address of the notification socket. A leading `@` stands for the abstract namespace.
fn socket_address(address: &OsString) -> io::Result<SocketAddrUnix> {
    let address = match address.as_bytes() {
        [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name),
        path => SocketAddrUnix::new(path),
    };
    Ok(address?)
}

/// Takes the descriptors that an earlier firnd had stored and that the service manager passed to this process
/// (sd_listen_fds(3)). Empty if none were passed. Call this only once, because the descriptors belong to the result.
pub(super) fn take_stored() -> Vec<KeptDescriptor> {
    let number_in_environment = |name: &str| std::env::var(name).ok()?.parse::<u32>().ok();
    if number_in_environment("LISTEN_PID") != Some(std::process::id()) {
        return Vec::new();
    }
    let count = number_in_environment("LISTEN_FDS").unwrap_or(0);
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut stored = Vec::new();
    for (raw_fd, name) in (FIRST_DESCRIPTOR..)
        .take(count as usize)
        .zip(names.split(':'))
    {
        // A descriptor with another name was stored by another program, and is not touched.
        let Some(label) = label_from_name(name) else {
            continue;
        };
        // SAFETY: sd_listen_fds(3) gives this descriptor to this process, and nothing else has taken it.
        let descriptor = unsafe { OwnedFd::from_raw_fd(raw_fd) };
        if fcntl_setfd(descriptor.as_fd(), FdFlags::CLOEXEC).is_ok() {
            stored.push(KeptDescriptor { label, descriptor });
        }
    }
    stored
}

/// Returns the name of a stored descriptor.
fn name_of_label(label: Label) -> String {
    format!("{NAME_PREFIX}{}-{}", label.tag as u8, label.number)
}

/// Returns the label of a stored descriptor; `None` if another program stored it.
fn label_from_name(name: &str) -> Option<Label> {
    let (tag, number) = name.strip_prefix(NAME_PREFIX)?.split_once('-')?;
    Some(Label {
        tag: Tag::from_number(tag.parse().ok()?)?,
        number: number.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_descriptors_come_back_and_other_names_are_ignored() {
        for label in [
            Tag::Device.into(),
            Label {
                tag: Tag::LockFile,
                number: u64::MAX,
            },
        ] {
            assert_eq!(label_from_name(&name_of_label(label)), Some(label));
        }
        for other in ["stored", "firn-", "firn-2", "firn-200-1", "firn-2-x", ""] {
            assert_eq!(label_from_name(other), None, "{other}");
        }
    }
}
