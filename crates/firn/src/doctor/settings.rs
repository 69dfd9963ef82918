//! Check of the user's settings: the options of a mount, environment variables, and the runtime directory.

use firn_client::paths::{open_runtime_dir, runtime_dir};

use crate::doctor::{CheckSubject, Finding, user_id};

/// Reports whether a mount would accept the options, whether each variable that begins with FIRN_ has an effect, and
/// whether the runtime directory, where firnd has its files, can be used.
pub(crate) fn check_settings(subject: &CheckSubject<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(fault) = subject.options_fault {
        findings.push(Finding::wrong(
            fault,
            "`firn config` shows where each value comes from",
        ));
    }
    let names = std::env::vars_os().map(|(name, _)| name);
    for unknown in firn_config::unknown_variables(names) {
        let name = firn_format::quote::quoted(unknown.name.as_bytes());
        let text = format!("the variable {name} has no effect");
        let advice = match unknown.nearest {
            Some(nearest) => format!("did you mean {nearest}?"),
            None => "`firn config` lists what can be set".to_owned(),
        };
        findings.push(Finding::note(text, advice));
    }
    let opened = runtime_dir().and_then(|dir| open_runtime_dir(&dir, user_id()));
    if let Err(error) = opened {
        findings.push(Finding::refused(error.to_string()));
    }
    if findings.is_empty() {
        findings.push(Finding::ok(
            "options, variables and the runtime directory can be used",
        ));
    }
    findings
}
