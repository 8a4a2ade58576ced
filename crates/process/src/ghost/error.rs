//! Why a ghost cannot be what the checkpoint says.

use hotspare_image::tree::GuestPid;
use hotspare_kernel::KernelError;

use crate::init::InitError;
use crate::objects::error::ObjectError;

/// Why a ghost cannot be what the checkpoint says.
#[derive(Debug, thiserror::Error)]
pub enum GhostError {
    /// {0}
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// ghost process {pid}: {source}
    #[error("ghost process {pid}: {source}")]
    At {
        /// The process or thread, in the guest's numbering.
        pid: GuestPid,
        /// The kernel's answer.
        source: KernelError,
    },
    /// {0}
    #[error(transparent)]
    Init(#[from] InitError),
    /// {0}
    #[error(transparent)]
    Object(#[from] ObjectError),
    /// {what} cannot be restored: {reason}
    #[error("{what} cannot be restored: {reason}")]
    Refused {
        /// The object in the user's words.
        what: String,
        /// The reason.
        reason: String,
    },
    /// the ghost must be built anew: {0}
    #[error("the ghost must be built anew: {0}")]
    Rebuild(String),
    /// the checkpoint contradicts itself: {0}
    #[error("the checkpoint contradicts itself: {0}")]
    Image(String),
    /// cannot {verb}: {source}
    #[error("cannot {verb}: {source}")]
    Io {
        /// Verb and noun.
        verb: String,
        /// The system's answer.
        source: std::io::Error,
    },
}

/// Result of work on a ghost.
pub type GhostResult<T> = Result<T, GhostError>;

impl GhostError {
    pub(super) fn refused(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Refused { what: what.into(), reason: reason.into() }
    }

    pub(super) fn io(verb: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let verb = verb.into();
        move |source| Self::Io { verb, source }
    }

    /// Adds which process it was.
    pub(super) fn at(pid: GuestPid) -> impl FnOnce(GhostError) -> Self {
        move |error| match error {
            Self::Kernel(source) => Self::At { pid, source },
            other => other,
        }
    }
}
