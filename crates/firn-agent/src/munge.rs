//! Authentication by MUNGE: its daemon munged, on each host of a site, certifies which user made a credential.
//!
//! Two processes on different hosts authenticate each other. The *agent* serves the files of a mount. The *puller*
//! connects to it to copy these files. In its first message, the *hello*, the puller sends a credential:
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
//! munged, and each connection runs them only once. No foreign code then runs in the agent, which maps the mount's
//! memory.
//!
//! Promises
//! * A credential of another user, a used one and an expired one are refused.
//! * No call takes longer than its deadline, even if munged hangs.

use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::time::Instant;

use firn_process::{ExcessOutput, Limits, RunError};
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
        let output = run_program(command, key.digits().as_bytes(), deadline)?;
        let credential = output.trim_end();
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
        let Some(opened) = OpenedCredential::parse(&output) else {
            return Err(failed("unmunge", "its output cannot be parsed"));
        };
        if opened.uid != geteuid().as_raw() {
            return Err(WireError::OtherUser { uid: opened.uid });
        }
        Ok(opened.key)
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

/// The content of a credential that unmunge(1) has opened.
struct OpenedCredential {
    /// User that made the credential.
    uid: u32,
    key: Key,
}

impl OpenedCredential {
    /// Parses the output of unmunge(1): a line such as `UID:  1000`, an empty line, and the payload.
    fn parse(output: &str) -> Option<Self> {
        let (uid_line, payload) = output.split_once("\n\n")?;
        let uid = uid_line.strip_prefix("UID:")?.trim().parse().ok()?;
        let key = Key::from_digits(payload)?;
        Some(Self { uid, key })
    }
}

/// Runs a program of MUNGE, the authentication service of a site, with an input. Returns its output, or its error
/// message as an error. Fails if it has not ended by `deadline` or prints more than a credential needs.
fn run_program(command: Command, input: &[u8], deadline: Instant) -> Result<String, WireError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let limits = Limits {
        input,
        output_bytes_max: OUTPUT_BYTES_MAX,
        excess: ExcessOutput::Refuse,
        deadline,
    };
    let ended = match firn_process::run(command, limits) {
        Ok(ended) => ended,
        Err(RunError::Start(error)) => return Err(WireError::NoMunge { program, error }),
        Err(error) => return Err(failed(&program, error.to_string())),
    };
    let output = String::from_utf8_lossy(&ended.output).into_owned();
    if ended.status.success() {
        return Ok(output);
    }
    Err(failed(&program, failure_message(ended.status, &output)))
}

/// Returns the reason why munge(1) or unmunge(1) failed, by its exit status and its output. A *credential* is what
/// munge(1) makes to prove its user; unmunge(1) checks it.
fn failure_message(status: ExitStatus, output: &str) -> &str {
    // With these three statuses, unmunge(1) has opened the credential, and only the status says why it is invalid.
    match status.code() {
        Some(EMUNGE_CRED_EXPIRED) => {
            return "Expired credential: it is too old, or the clocks of the hosts differ";
        }
        Some(EMUNGE_CRED_REWOUND) => return "Rewound credential: the clocks of the hosts differ",
        Some(EMUNGE_CRED_REPLAYED) => return "Replayed credential",
        _ => {}
    }
    for line in output.lines() {
        if let Some((_, message)) = line.split_once("Error: ") {
            return message;
        }
    }
    "it failed without a message"
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
        let output = format!("UID:             1000\n\n{digits}");
        let opened = OpenedCredential::parse(&output).unwrap();
        assert_eq!((opened.uid, opened.key.digits()), (1000, digits.clone()));
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
            assert!(OpenedCredential::parse(&output).is_none(), "{output}");
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
