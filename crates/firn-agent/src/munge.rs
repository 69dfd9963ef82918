//! Authentication by MUNGE: its daemon munged, on each host of a site, certifies which user made a credential.
//!
//! ```text
//!   puller:  new key ─► munge --restrict-uid=SELF ─► credential, in the hello
//!   agent:   credential ─► unmunge ─► key, if this user made the credential and it was not used before
//! ```
//!
//! The handshake uses this key like any other. A complete handshake proves that both sides are the same user: the
//! puller could make the credential, and the agent could open it. The credential is part of the handshake, so an
//! attacker gains nothing by copying it to another connection.
//!
//! The programs munge(1) and unmunge(1) are run, and libmunge is not loaded. The programs exist on every host with
//! munged, and each connection runs them only once. No foreign code then runs in a process that maps the arena.
//!
//! Promises
//! * A credential of another user, a used one and an expired one are refused.
//! * No call takes longer than its deadline, even if munged hangs.

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use firn_process::{Ended, Excess, Limits, RunError};
use rustix::process::geteuid;

use crate::auth::Key;
use crate::error::WireError;

/// Maximum number of bytes of a credential: twice the size of a credential with a key.
pub(crate) const CREDENTIAL_BYTES_MAX: usize = 512;
/// Maximum number of bytes of the output of munge(1) and unmunge(1).
const OUTPUT_BYTES_MAX: usize = 1024;
/// Exit status of unmunge(1): the credential has expired (munge.h).
const EMUNGE_CRED_EXPIRED: i32 = 15;
/// Exit status of unmunge(1): the credential was made in the future.
const EMUNGE_CRED_REWOUND: i32 = 16;
/// Exit status of unmunge(1): the credential was used before.
const EMUNGE_CRED_REPLAYED: i32 = 17;

/// Access to the munged of this host.
#[derive(Clone, Debug, Default)]
pub struct Munge {
    /// Socket of munged; `None` means the default one.
    pub socket: Option<PathBuf>,
}

impl Munge {
    /// Makes a credential with a key in it, which only processes of this user can open.
    pub(crate) fn wrap(&self, key: &Key, deadline: Instant) -> Result<String, WireError> {
        let mut command = self.command("munge");
        command.arg(format!("--restrict-uid={}", geteuid().as_raw()));
        // The cipher is named explicitly, because a munged may use no encryption by default.
        command.args(["--cipher=aes128", "--mac=sha256", "--zip=none"]);
        let credential = run_program(command, key.digits().as_bytes(), deadline)?;
        let credential = credential.trim_end();
        if credential.len() > CREDENTIAL_BYTES_MAX {
            return Err(failed("munge", "its credential is too long"));
        }
        Ok(credential.to_owned())
    }

    /// Opens a credential and returns its key. A credential of another user is refused.
    pub(crate) fn unwrap(&self, credential: &str, deadline: Instant) -> Result<Key, WireError> {
        let mut command = self.command("unmunge");
        command.args(["--numeric", "--keys=UID"]);
        let output = run_program(command, credential.as_bytes(), deadline)?;
        let (uid, key) =
            parse(&output).ok_or_else(|| failed("unmunge", "its output cannot be parsed"))?;
        if uid != geteuid().as_raw() {
            return Err(WireError::OtherUser { uid });
        }
        Ok(key)
    }

    /// Returns a command of MUNGE with the option for the socket.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        if let Some(socket) = &self.socket {
            command.arg("--socket").arg(socket);
        }
        command
    }
}

/// Parses the output of unmunge(1): a line such as `UID:  1000`, an empty line, and the payload.
fn parse(output: &str) -> Option<(u32, Key)> {
    let (head, payload) = output.split_once("\n\n")?;
    let uid = head.strip_prefix("UID:")?.trim().parse().ok()?;
    Some((uid, Key::from_digits(payload)?))
}

/// Runs a program with an input. Returns its output, or its error message as an error.
fn run_program(command: Command, input: &[u8], deadline: Instant) -> Result<String, WireError> {
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
    // With these three statuses, unmunge(1) has opened the credential, and only the status says why it is invalid.
    let message = match status.code() {
        Some(EMUNGE_CRED_EXPIRED) => {
            "Expired credential: it is too old, or the clocks of the hosts differ"
        }
        Some(EMUNGE_CRED_REWOUND) => "Rewound credential: the clocks of the hosts differ",
        Some(EMUNGE_CRED_REPLAYED) => "Replayed credential",
        _ => {
            let mut lines = output.lines();
            let line = lines.find_map(|line| line.split_once("Error: "));
            line.map_or("it failed without a message", |(_, message)| message)
        }
    };
    Err(failed(&name, message))
}

/// Makes the error of a program that was started and did not succeed.
fn failed(program: &str, message: impl Into<String>) -> WireError {
    WireError::Munge {
        program: program.into(),
        told: message.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_output_of_unmunge_is_accepted_only_with_a_user_and_a_key() {
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
    fn a_program_that_hangs_writes_too_much_or_is_missing_is_an_error_in_time() {
        let deadline = Instant::now() + Duration::from_millis(300);
        let mut hangs = Command::new("sleep");
        hangs.arg("1000");
        assert!(matches!(
            run_program(hangs, b"x", deadline),
            Err(WireError::Munge { .. })
        ));
        let deadline = Instant::now() + Duration::from_secs(60);
        let endless = run_program(Command::new("yes"), b"x", deadline);
        assert!(matches!(endless, Err(WireError::Munge { .. })));
        let missing = run_program(Command::new("/no/munge"), b"x", deadline);
        assert!(matches!(missing, Err(WireError::NoMunge { .. })));
        assert_eq!(
            run_program(Command::new("cat"), b"x\n", deadline).unwrap(),
            "x\n"
        );
    }
}
