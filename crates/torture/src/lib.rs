//! Simulated hosts, fault injection and clients that verify every reply.
//!
//! [`lab`] makes hosts out of namespaces on this machine; tests, demo and benches all use it.
#![forbid(unsafe_code)]

pub mod bench;
pub mod campaign;
pub mod chain;
pub mod clients;
pub mod clock;
pub mod connections;
pub mod demo;
pub mod dice;
pub mod etcd;
pub mod fleet;
pub mod guests;
pub mod lab;
pub mod picture;
pub mod programs;
pub mod protected;
pub mod scenario;

pub use lab::{Host, Lab};
