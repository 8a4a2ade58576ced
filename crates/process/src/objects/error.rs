//! Why a kernel object cannot be captured or restored.

use hotspare_image::tree::GuestPid;
use hotspare_kernel::KernelError;

/// Why a kernel object cannot be captured or restored.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// {what} cannot be protected: {reason}
    #[error("{what} cannot be protected: {reason}")]
    Refused {
        /// The object in the user's words: `UNIX socket 4711`.
        what: String,
        /// The reason, and the way out where there is one.
        reason: String,
    },
    /// {what} is in a state that passes: {reason}; the next checkpoint may succeed
    #[error("{what} is in a state that passes: {reason}; the next checkpoint may succeed")]
    Transient {
        /// The object in the user's words.
        what: String,
        /// What has to pass.
        reason: String,
    },
    /// {what}: {source}
    #[error("{what}: {source}")]
    Kernel {
        /// What we were doing, with which object.
        what: String,
        /// The kernel's answer.
        source: KernelError,
    },
    /// the image contradicts itself: {0}
    #[error("the image contradicts itself: {0}")]
    Image(String),
    /// process {pid}, descriptor {fd}: {source}
    #[error("process {pid}, descriptor {fd}: {source}")]
    At {
        /// The process, in the guest's numbering.
        pid: GuestPid,
        /// The descriptor.
        fd: i32,
        /// What is wrong with it.
        source: Box<ObjectError>,
    },
    /// {0}
    #[error(transparent)]
    Call(#[from] KernelError),
}

/// Result of a capture or restore.
pub type ObjectResult<T> = Result<T, ObjectError>;

impl ObjectError {
    /// A refusal.
    pub fn refused(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Refused { what: what.into(), reason: reason.into() }
    }

    /// A refusal for this instant only.
    pub fn transient(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Transient { what: what.into(), reason: reason.into() }
    }

    /// Adds whose descriptor it was.
    pub fn at(self, pid: GuestPid, fd: i32) -> Self {
        match self {
            Self::At { .. } => self,
            // Stays what it is: whoever takes checkpoints tries again.
            Self::Transient { what, reason } => {
                Self::Transient { what: format!("process {pid}, descriptor {fd}: {what}"), reason }
            }
            source => Self::At { pid, fd, source: Box::new(source) },
        }
    }

    /// Whether the next checkpoint may succeed: of a state that passes, or of a process that has
    /// just ended.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Transient { .. } => true,
            Self::At { source, .. } => source.is_transient(),
            Self::Call(error) => error.is_died(),
            Self::Kernel { .. } | Self::Refused { .. } | Self::Image(_) => false,
        }
    }

    /// Adds to a kernel error which object it was about.
    pub fn kernel(what: impl Into<String>) -> impl FnOnce(KernelError) -> Self {
        let what = what.into();
        move |source| Self::Kernel { what, source }
    }
}
