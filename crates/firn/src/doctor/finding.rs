//! What a check found.

use serde::{Deserialize, Serialize};

/// How it stands. The order is that of severity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// Firn works; something should be known, or is not as good as it could be.
    Note,
    /// Firn, or something that it promises, fails.
    Wrong,
}

impl Verdict {
    /// One word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Wrong => "wrong",
        }
    }
}

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The check that found it.
    #[serde(default)]
    pub check: String,
    /// How it stands.
    pub verdict: Verdict,
    /// What was found.
    pub text: String,
    /// What to type or to change; none where nothing is to be done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

impl Finding {
    /// All is well.
    pub fn ok(text: impl Into<String>) -> Self {
        Self {
            check: String::new(),
            verdict: Verdict::Ok,
            text: text.into(),
            advice: None,
        }
    }

    /// Something to know.
    pub fn note(text: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::Note,
            advice: Some(advice.into()),
            ..Self::ok(text)
        }
    }

    /// Something fails.
    pub fn wrong(text: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::Wrong,
            ..Self::note(text, advice)
        }
    }

    /// Something fails, and its text says what to do.
    pub fn refused(text: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::Wrong,
            ..Self::ok(text)
        }
    }
}
