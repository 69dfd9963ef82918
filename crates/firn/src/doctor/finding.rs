//! The result of a check: a verdict, a text that says what was found, and advice what to do.

use serde::{Deserialize, Serialize};

/// Verdict of a finding. The order is that of severity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The subject is as it should be.
    Ok,
    /// Firn works. The user should know something, or something is not as good as it could be.
    Note,
    /// Firn, or something that Firn promises, fails.
    Wrong,
}

impl Verdict {
    /// Returns the verdict as one word for the table.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Wrong => "wrong",
        }
    }
}

/// One finding: a line of the table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Name of the check that made the finding.
    #[serde(default)]
    pub check: String,
    /// How severe the finding is.
    pub verdict: Verdict,
    /// What was found, in words.
    pub text: String,
    /// What the user should type or change. `None` means that there is nothing to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

impl Finding {
    /// Returns a finding without a problem.
    pub fn ok(text: impl Into<String>) -> Self {
        Self {
            check: String::new(),
            verdict: Verdict::Ok,
            text: text.into(),
            advice: None,
        }
    }

    /// Returns a finding that the user should know of.
    pub fn note(text: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::Note,
            advice: Some(advice.into()),
            ..Self::ok(text)
        }
    }

    /// Returns a finding of a failure, with advice.
    pub fn wrong(text: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::Wrong,
            ..Self::note(text, advice)
        }
    }

    /// Returns a finding of a failure without advice, for an error whose text already says what to do.
    pub fn refused(text: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::Wrong,
            ..Self::ok(text)
        }
    }
}
