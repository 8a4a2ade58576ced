//! Kernel objects: both halves, capture and restore, of each kind in one file.

pub mod error;
pub mod netlink;
pub mod socket;
pub mod socket_options;
pub mod tcp;
pub mod udp;
pub mod unix;
