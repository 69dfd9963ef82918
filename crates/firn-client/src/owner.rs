//! Reads facts about processes from /proc: the start time, which identifies the owner of a transaction (firnd aborts
//! the transaction when its owner ends), and the umask, which mkdir(2) applies to modes.

use std::io;

use firn_protocol::Owner;

/// Describes the process `pid` as the owner of a transaction. The start time distinguishes the process from a later
/// one with the same id.
pub fn owner_process(pid: u32) -> io::Result<Owner> {
    let start_ticks = start_ticks_of(pid)?;
    Ok(Owner::Process { pid, start_ticks })
}

/// Returns the start time of a living process, in clock ticks since the host started (`starttime` of
/// proc_pid_stat(5)).
pub fn start_ticks_of(pid: u32) -> io::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    parse_start_ticks(&stat).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Returns `mode` without the bits of this process's umask, as mkdir(2) applies it.
pub fn without_umask(mode: u32) -> u32 {
    // umask(2) returns the mask only by changing it, for all threads of the process.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    mode & !parse_umask(&status).unwrap_or(0o077)
}

fn parse_umask(status: &str) -> Option<u32> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("Umask:"))?;
    u32::from_str_radix(line.trim(), 8).ok()
}

fn parse_start_ticks(stat: &str) -> Option<u64> {
    // The second field is the program name in parentheses; the name may contain any characters.
    let (_, fields_after_name) = stat.rsplit_once(')')?;
    // proc_pid_stat(5) counts the start time as field 22, and the first field after the name as field 3.
    const START_TIME_INDEX: usize = 22 - 3;
    let mut fields = fields_after_name.split_ascii_whitespace();
    fields.nth(START_TIME_INDEX)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_umask_is_found_in_the_status() {
        assert_eq!(
            parse_umask("Name:\tx\nUmask:\t0027\nState:\tR\n"),
            Some(0o27)
        );
        assert_eq!(parse_umask("Name:\tx\n"), None);
        assert_eq!(without_umask(0o777) & !0o777, 0);
    }

    #[test]
    fn the_start_is_found_behind_any_name() {
        let line = "17 (a) b) (c) S 1 17 17 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4711 1000 2 3";
        assert_eq!(parse_start_ticks(line), Some(4711));
        assert!(start_ticks_of(std::process::id()).is_ok_and(|ticks| ticks > 0));
        assert!(parse_start_ticks("17 (x) S 1").is_none());
    }
}
