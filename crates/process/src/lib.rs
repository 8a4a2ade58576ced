//! Capture and restore of a process tree: the guest on the primary, the ghost on the spare.
#![forbid(unsafe_code)]

pub mod capture;
pub mod ghost;
pub mod guest;
pub mod init;
pub mod lazy;
pub mod objects;
pub mod pages;
