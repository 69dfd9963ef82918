//! MUNGE: a daemon of the site that says which user made a credential, on any of its hosts.
//!
//! ```text
//!   puller:  new key ─► munge --restrict-uid=SELF ─► credential, in its hello
//!   agent:   credential ─► unmunge ─► key, if its user made it and it was not used before
//! ```
//!
//! The handshake goes on with that key as with any other. It shows that both sides are the same user: the puller has
//! made the credential, and the agent was able to open it. The credential is part of the handshake, so it belongs to
//! this connection: carried to another one, it gives no part in the keys of this one.
//!
//! munge(1) and unmunge(1) are started, and libmunge is not loaded. Where there is a munged there are these programs, a
//! connection costs two of them once, and no foreign code runs in a process that maps the arena.
//!
//! Promises
//! * A credential of another user, one that was used before or one that is too old opens nothing.
//! * No call takes longer than its deadline, whatever becomes of munged.

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use firn_process::{Ended, Excess, Limits, RunError};
use rustix::process::geteuid;

use crate::auth::Key;
use crate::error::WireError;

/// Bytes of the longest credential: what a key needs, twice.
pub(crate) const CREDENTIAL_BYTES_MAX: usize = 512;
/// Bytes of the longest output of these programs.
const OUTPUT_BYTES_MAX: usize = 1024;

/// How munged is reached.
#[derive(Clone, Debug, Default)]
pub struct Munge {
    /// Its socket, if not where it is by default.
    pub socket: Option<PathBuf>,
}

impl Munge {
    /// A credential from which only this user learns the key.
    pub(crate) fn wrap(&self, key: &Key, deadline: Instant) -> Result<String, WireError> {
        let mut command = self.command("munge");
        command.arg(format!("--restrict-uid={}", geteuid().as_raw()));
        // The cipher is named: a munged may have been built with none as its default.
        command.args(["--cipher=aes128", "--mac=sha256", "--zip=none"]);
        let credential = converse(command, key.digits().as_bytes(), deadline)?;
        let credential = credential.trim_end();
        if credential.len() > CREDENTIAL_BYTES_MAX {
            return Err(failed("munge", "its credential is too long"));
        }
        Ok(credential.to_owned())
    }

    /// The key of a credential that this user made.
    pub(crate) fn unwrap(&self, credential: &str, deadline: Instant) -> Result<Key, WireError> {
        let mut command = self.command("unmunge");
        command.args(["--numeric", "--keys=UID"]);
        let output = converse(command, credential.as_bytes(), deadline)?;
        let (uid, key) = parse(&output).ok_or_else(|| failed("unmunge", "it said nonsense"))?;
        if uid != geteuid().as_raw() {
            return Err(WireError::OtherUser { uid });
        }
        Ok(key)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        if let Some(socket) = &self.socket {
            command.arg("--socket").arg(socket);
        }
        command
    }
}

/// `UID:  1000`, an empty line, the payload.
fn parse(output: &str) -> Option<(u32, Key)> {
    let (head, payload) = output.split_once("\n\n")?;
    let uid = head.strip_prefix("UID:")?.trim().parse().ok()?;
    Some((uid, Key::from_digits(payload)?))
}

/// Gives a program its input and takes its output.
fn converse(command: Command, input: &[u8], deadline: Instant) -> Result<String, WireError> {
    let name = command.get_program().to_string_lossy().into_owned();
    let limits = Limits {
        input,
        output_bytes_max: OUTPUT_BYTES_MAX,
        excess: Excess::Refuse,
        deadline,
    };
    let Ended { status, output } =
        firn_process::run(command, limits).map_err(|error| match error {
            RunError::Start(error) => WireError::NoMunge {
                program: name.clone(),
                error,
            },
            error => failed(&name, error.to_string()),
        })?;
    let output = String::from_utf8_lossy(&output).into_owned();
    if status.success() {
        return Ok(output);
    }
    // What munged says of a credential that it could open is in the status alone (munge.h).
    let told = match status.code() {
        Some(15) => "Expired credential: its time is over, or the clocks of the hosts differ",
        Some(16) => "Rewound credential: the clocks of the hosts differ",
        Some(17) => "Replayed credential",
        _ => {
            let mut lines = output.lines();
            let line = lines.find_map(|line| line.split_once("Error: "));
            line.map_or("it failed without a word", |(_, told)| told)
        }
    };
    Err(failed(&name, told))
}

fn failed(program: &str, told: impl Into<String>) -> WireError {
    WireError::Munge {
        program: program.into(),
        told: told.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_a_user_and_a_key_are_taken_from_unmunge() {
        let digits = Key::random().unwrap().digits();
        let (uid, key) = parse(&format!("UID:             1000\n\n{digits}")).unwrap();
        assert_eq!((uid, key.digits()), (1000, digits.clone()));
        for output in [
            String::new(),
            digits.clone(),
            format!("UID: 1000\n{digits}"),
            format!("UID: -1\n\n{digits}"),
            format!("UID: root\n\n{digits}"),
            format!("GID: 1000\n\n{digits}"),
            format!("UID: 1000\n\n{digits}0"),
            "UID: 1000\n\n".into(),
        ] {
            assert!(parse(&output).is_none(), "{output}");
        }
    }

    #[test]
    fn a_program_that_hangs_says_too_much_or_is_not_there_is_an_error_in_time() {
        let deadline = Instant::now() + Duration::from_millis(300);
        let mut hangs = Command::new("sleep");
        hangs.arg("1000");
        assert!(matches!(
            converse(hangs, b"x", deadline),
            Err(WireError::Munge { .. })
        ));
        let deadline = Instant::now() + Duration::from_secs(60);
        let endless = converse(Command::new("yes"), b"x", deadline);
        assert!(matches!(endless, Err(WireError::Munge { .. })));
        let missing = converse(Command::new("/no/munge"), b"x", deadline);
        assert!(matches!(missing, Err(WireError::NoMunge { .. })));
        assert_eq!(
            converse(Command::new("cat"), b"x\n", deadline).unwrap(),
            "x\n"
        );
    }
}
