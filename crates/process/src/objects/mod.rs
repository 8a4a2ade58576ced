//! Kernel objects: both halves, capture and restore, of each kind in one file.

pub mod error;
pub mod socket_options;
pub mod tcp;
