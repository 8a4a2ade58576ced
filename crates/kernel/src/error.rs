//! One error for everything the kernel refuses.

use crate::ptrace::HostPid;

/// What the kernel refused, in the words of the caller.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// process {0} is gone
    #[error("process {0} is gone")]
    Died(HostPid),
    /// cannot {verb}: {source}
    #[error("cannot {verb}: {source}")]
    Call {
        /// Verb and noun: `read pagemap`.
        verb: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// {0}: not what the kernel documents
    #[error("{0}: not what the kernel documents")]
    Unexpected(String),
}

/// Result of a kernel call.
pub type Result<T> = std::result::Result<T, KernelError>;

impl KernelError {
    /// The calling thread's last error, for `verb`.
    pub fn last(verb: &'static str) -> Self {
        Self::Call { verb, source: std::io::Error::last_os_error() }
    }

    /// Error number `errno`, for `verb`.
    pub fn from_errno(verb: &'static str, errno: i32) -> Self {
        Self::Call { verb, source: std::io::Error::from_raw_os_error(errno) }
    }

    /// An I/O error, for `verb`.
    pub fn io(verb: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Call { verb, source }
    }

    /// The error number, where there is one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Died(_) => Some(libc::ESRCH),
            Self::Call { source, .. } => source.raw_os_error(),
            Self::Unexpected(_) => None,
        }
    }

    /// Whether the process went away meanwhile, which is an ordinary answer.
    pub fn is_died(&self) -> bool {
        self.errno() == Some(libc::ESRCH)
    }
}

/// Turns a C return value into a result.
pub(crate) fn check(verb: &'static str, value: libc::c_long) -> Result<libc::c_long> {
    if value == -1 { Err(KernelError::last(verb)) } else { Ok(value) }
}
